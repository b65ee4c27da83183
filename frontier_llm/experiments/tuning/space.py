"""Which layouts a search may try: the planner's, priced and cut to the best few hundred, each as words for
`frontier-llm train`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from frontier_llm.blueprint.layout import FIELD_OF_KEY, Layout, run_keys
from frontier_llm.config import RunConfig, build
from frontier_llm.config.load import merge
from frontier_llm.errors import ConfigError
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.candidates import enumerate_layouts, fixed_words
from frontier_llm.planner.costs.memory import peak_memory
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.search import Plan, preference, simulate_layout
from frontier_llm.topology.plan import plan_problems

MOST_LAYOUTS = 256  # simulated in at most half a minute for 3072 GCDs (1T: 90 ms each)
# times the best predicted step: for a better one the planner would have to be wrong twofold between two layouts of one
# model
WITHIN = 2.0

CHOICES = tuple(dict.fromkeys(FIELD_OF_KEY.values()))  # what tells one layout of a table of trials from another


def words_of(keys: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sections of a run file as key=value words."""
    text = {True: "true", False: "false", None: "null"}
    return [
        f"{section}.{key}={text[value] if value is None or isinstance(value, bool) else value}"
        for section, values in keys.items()
        for key, value in values.items()
    ]


@dataclass(frozen=True)
class Space:
    """The layouts of one model on one number of devices, each with its simulated step."""

    config: RunConfig  # what they are laid over
    devices: int
    plans: tuple[Plan, ...]  # by predicted step; the first is the planner's choice
    legal: int  # before the cut
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def index(self, layout: Layout) -> int | None:
        """Which one this is; None for a layout from outside."""
        return next((number for number, plan in enumerate(self.plans) if plan.layout == layout), None)


def make_space(
    config: RunConfig,
    rates: Rates,
    devices: int,
    tp_max: int,
    fixed: Mapping[str, Any],
    most: int = MOST_LAYOUTS,
    within: float = WITHIN,
) -> Space:
    """Every legal layout that fits into memory, cut to the `most` best and those predicted `within` the best. Raises
    ConfigError for none.
    """
    fixed = {"gradient_wire": config.precision.gradient_wire, **fixed}
    shared = {
        "dtype": config.precision.dtype,
        "optimizer": config.optimizer.name,
    }
    layouts = enumerate_layouts(config.model, devices, config.batch.global_batch, tp_max, fixed, **shared)
    # copies of shares are no choice of a table of trials
    layouts = layouts.where(layouts.data_shard == fixed.get("data_shard", 0))
    fitting = (
        layouts.where(peak_memory(config.model, layouts, rates) <= rates.memory_bytes) if len(layouts) else layouts
    )
    if not len(fitting):
        what = (
            f"none of {len(layouts)} legal layouts on {devices} devices fits into memory"
            if len(layouts)
            else f"no layout of {devices} devices is legal"
        )
        fixes = f" --fix {fixed_words(fixed)}" if fixed else ""
        raise ConfigError(
            f"{what} (global batch {config.batch.global_batch}{fixes})", "other --nodes, or fewer --fix", "tune"
        )
    seconds = step_s(config.model, fitting, rates)
    order = np.argsort(seconds, kind="stable")
    best = [fitting.row(index) for index in order if seconds[index] <= within * seconds[order[0]]]
    legal = [layout for layout in best if not plan_problems(laid_out(config, layout), devices)][:most]
    plans = [simulate_layout(config.model, layout, rates) for layout in legal]
    plans = sorted((plan for plan in plans if plan.peak_bytes <= plan.limit_bytes), key=preference)
    return Space(config, devices, tuple(plans), len(fitting), fixed)


def laid_out(config: RunConfig, layout: Layout) -> RunConfig:
    """The run in this layout."""
    return build(RunConfig, merge(config.model_dump(mode="json"), run_keys(layout)))


def features(plans: Sequence[Plan]) -> np.ndarray:
    """One row per layout: its choices, and where the planner says that its time goes. Columns of mean 0 and deviation
    1.

    The shares are what lets one trial speak for many: where messages cost more than the machine file says, every layout
    is slower by its share of them. The step itself is one of them, so that a planner whose order is wrong is one number
    to learn too. The bubble counts by the logarithm of what it leaves, so that a machine on which it costs nothing is
    one number, and the passes of a step likewise, for what each costs the host.
    """
    columns: list[np.ndarray] = []
    for name in CHOICES:
        values = [getattr(plan.layout, name) for plan in plans]
        if isinstance(values[0], str):
            columns += [
                np.array([value == option for value in values], dtype=float) for option in sorted(set(values))[1:]
            ]
        else:
            columns.append(np.log2(np.array(values, dtype=float) + (min(values) < 1)))  # False and 0 have a place, too
    columns += [np.array(column) for column in zip(*(_shares(plan) for plan in plans), strict=True)]
    columns.append(np.log([plan.step_s for plan in plans]))
    table = np.stack(columns, axis=1)
    spread = table.std(axis=0)
    return (table - table.mean(axis=0))[:, spread > 1e-12] / spread[spread > 1e-12]


def _shares(plan: Plan) -> tuple[float, ...]:
    """Of the simulated step: waiting in the pipeline, messages, gradient sums and gathers, optimizer; and of memory;
    passes per rank.
    """
    played = plan.played
    passes = plan.layout.microbatches * plan.layout.chunks
    bubble = played.bubble * played.pipeline_s / plan.step_s
    return (
        -math.log(1 - bubble),
        2 * played.message_s * passes / plan.step_s,
        (played.reduce_s + played.gather_s) / plan.step_s,
        played.optimizer_s / plan.step_s,
        plan.peak_bytes / plan.limit_bytes,
        math.log2(passes),
    )
