"""The machine's constants as the trials have them: fitted to all measured steps at once, from the machine file's
values.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from frontier_llm.errors import FrontierError, not_installed
from frontier_llm.experiments.tuning.search import Tuner
from frontier_llm.experiments.tuning.trials import Trial
from frontier_llm.machine.load import (
    PLACES,
    load_machine,
    own_stack,
    rates,
)
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.time import step_s

# what steps can tell of a machine; each is multiplied by a factor
CONSTANTS = (
    "gemm_efficiency",
    "hbm_efficiency",
    "kernel_s",
    "launch_s",
    "microbatch_s",
    "step_s",
    "fabric_bytes_s",
    "fabric_latency_s",
    "network_efficiency",
    "network_latency_s",
)
SHARES = ("gemm_efficiency", "hbm_efficiency", "network_efficiency")  # at most 1
PRIOR = 0.004  # weight of (log factor)² against one trial's (log error)²: 3 % of a step is worth a change by 1.6
CHANGED = 0.1  # of a constant, below which the file keeps its value


def scaled(numbers: Rates, logs: np.ndarray) -> Rates:
    """`numbers` with each of CONSTANTS times exp(its log)."""
    changes: dict[str, Any] = {}
    for name, shift in zip(CONSTANTS, logs, strict=True):
        value = getattr(numbers, name)
        factor = math.exp(shift)
        if isinstance(value, tuple):
            changes[name] = tuple(one * factor for one in value)
        else:
            changes[name] = min(value * factor, 1.0) if name in SHARES else value * factor
    return replace(numbers, **changes)


def fit(search: Tuner, numbers: Rates) -> Rates:
    """The constants that suit the measured trials best. What they cannot tell stays near the machine file's."""
    try:
        from scipy.optimize import least_squares
    except ModuleNotFoundError:
        raise FrontierError(not_installed("scipy", "--emit-machine")) from None
    model = search.space.config.model
    plans = {plan.layout: plan for plan in search.space.plans}
    rows: list[Trial] = [trial for trial in search.tried.values() if trial.ok]
    # what the simulation knows and the closed form does not, as a factor that constants hardly change
    beyond = np.array([plans[trial.layout].step_s / plans[trial.layout].closed_form_s for trial in rows])
    measured = np.array([trial.step_s for trial in rows])

    def residuals(logs: np.ndarray) -> np.ndarray:
        own = scaled(numbers, logs)
        seconds = np.array([float(step_s(model, trial.layout, own)) for trial in rows])
        return np.concatenate([np.log(seconds * beyond / measured), math.sqrt(PRIOR) * logs])

    best = least_squares(residuals, np.zeros(len(CONSTANTS)), diff_step=1e-3, loss="soft_l1", f_scale=0.1, max_nfev=60)
    return scaled(numbers, best.x)


def changed(before: Rates, after: Rates) -> dict[str, tuple[float, float]]:
    """Constant → (value, fitted value), of those that differ by more than CHANGED."""
    pairs = {name: tuple(_first(getattr(one, name)) for one in (before, after)) for name in CONSTANTS}
    return {name: (old, new) for name, (old, new) in pairs.items() if old > 0 and abs(math.log(new / old)) > CHANGED}


def _first(value: Any) -> float:
    return float(value[0] if isinstance(value, tuple) else value)


def fitted_constants(search: Tuner) -> tuple[Rates, Rates]:
    """(the machine file's numbers, the fitted ones)."""
    machine = load_machine(search.space.config.machine)
    before = rates(machine, own_stack(machine))
    return before, fit(search, before)


def tuned_machine(search: Tuner) -> dict[str, Any]:
    """The mapping of a machine file on top of the run's, with the constants that changed."""
    name = search.space.config.machine
    machine = load_machine(name)
    before, after = fitted_constants(search)
    count = sum(trial.ok for trial in search.tried.values())
    words = f"fitted on {count} trials of {search.space.config.model.name} on {search.space.devices} devices"
    source = {"tag": "estimated", "source": f"frontier-llm tune, {datetime.now(UTC):%Y-%m-%d}: {words}"}
    sections: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for constant in changed(before, after):
        section, key, unit = PLACES[constant]
        value = getattr(after, constant)
        if isinstance(value, tuple):
            sections[section][key] = {
                size: _number(one / unit, source) for size, one in zip(after.fabric_size, value, strict=True)
            }
        else:
            sections[section][key] = _number(value / unit, source)
    if "stack" in sections:
        sections["stacks"] = {own_stack(machine): sections.pop("stack")}
    return {"base": name, "title": f"{machine.title}, as trials have it", **sections}


def _number(value: float, source: dict[str, str]) -> dict[str, Any]:
    return {"value": float(f"{value:.4g}"), **source}
