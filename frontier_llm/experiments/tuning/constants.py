"""Fit machine constants to all measured steps of a search, starting from the machine file's values."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np

from frontier_llm.experiments.measure.ceilings import ceilings_of
from frontier_llm.experiments.measure.fit import Measurements, fit
from frontier_llm.experiments.measure.machine_file import numbers_of, value_of
from frontier_llm.experiments.tuning.search import Tuner
from frontier_llm.machine.load import load_machine, own_stack, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.time import step_s

# fields of Rates that measured step times can determine; the fit multiplies each by a factor
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
# In the fit's cost, an error of 3 % in one step counts as much as a change of one constant by a factor of 1.6.
PRIOR = 0.004
KNEE = 0.1
CHANGED = 0.1  # relative change of a constant below which the new machine file keeps the old value


def fit_trials(search: Tuner, numbers: Rates) -> Rates:
    """Return the constants that fit the measured trials best. Raises FrontierError if scipy is not installed."""
    model = search.space.config.model
    plans = {plan.layout: plan for plan in search.space.plans}
    trials = [trial for trial in search.tried.values() if trial.ok]
    # simulated step time / step time by the formula, for each layout. This ratio hardly depends on the constants.
    beyond = np.array([plans[trial.layout].step_s / plans[trial.layout].closed_form_s for trial in trials])
    measurements = Measurements(
        start=numbers,
        constants=CONSTANTS,
        predicted_s=lambda own: beyond * np.array([float(step_s(model, trial.layout, own)) for trial in trials]),
        measured_s=np.array([trial.step_s for trial in trials]),
        prior=PRIOR,
        knee=KNEE,
        ceilings=ceilings_of(load_machine(search.space.config.machine).device.architecture),
    )
    return fit(measurements, evaluations=60, smooth=True)


def changed(before: Rates, after: Rates) -> dict[str, tuple[float, float]]:
    """Return constant → (value, fitted value) for constants that differ by more than CHANGED."""
    pairs = {name: (value_of(before, name), value_of(after, name)) for name in CONSTANTS}
    return {name: (old, new) for name, (old, new) in pairs.items() if old > 0 and abs(math.log(new / old)) > CHANGED}


def fitted_constants(search: Tuner) -> tuple[Rates, Rates]:
    """Return the machine file's numbers and the numbers that fit the search's trials."""
    machine = load_machine(search.space.config.machine)
    before = rates(machine, own_stack(machine))
    return before, fit_trials(search, before)


def tuned_machine(search: Tuner) -> dict[str, Any]:
    """Return the content of a machine file that is based on the run's, with the fitted values of constants that have
    changed.
    """
    name = search.space.config.machine
    machine = load_machine(name)
    before, after = fitted_constants(search)
    count = sum(trial.ok for trial in search.tried.values())
    words = f"fitted on {count} trials of {search.space.config.model.name} on {search.space.devices} devices"
    provenance = {"tag": "estimated", "source": f"frontier-llm tune, {datetime.now(UTC):%Y-%m-%d}: {words}"}
    sections = numbers_of(after, changed(before, after), provenance, digits=4)
    if "stack" in sections:
        sections["stacks"] = {own_stack(machine): sections.pop("stack")}
    return {"base": name, "title": f"{machine.title}, with constants fitted to trials", **sections}
