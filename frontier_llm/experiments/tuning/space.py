"""Search space of a tuning search: the planner's best few hundred layouts with their predicted step times.

`words_of` converts a layout to arguments of `frontier-llm train`.
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
from frontier_llm.planner.choice import preference
from frontier_llm.planner.costs.memory import peak_memory
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.search import Plan, simulate_layout
from frontier_llm.topology.plan import plan_problems

# Largest number of layouts in a space. Their simulation takes at most half a minute for 3072 GCDs (1T: 90 ms each).
MOST_LAYOUTS = 256
# Layouts whose predicted step takes more than this factor times the shortest predicted step are left out. Such a layout
# can be the fastest only if the planner's error differs by a factor of 2 between two layouts.
WITHIN = 2.0

CHOICES = tuple(dict.fromkeys(FIELD_OF_KEY.values()))  # fields of Layout that are columns of the table of trials


def words_of(keys: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return sections of a run file as key=value arguments."""
    text = {True: "true", False: "false", None: "null"}
    return [
        f"{section}.{key}={text[value] if value is None or isinstance(value, bool) else value}"
        for section, values in keys.items()
        for key, value in values.items()
    ]


@dataclass(frozen=True)
class Space:
    """Layouts of one model on one number of devices, each with its simulated step."""

    config: RunConfig  # configuration whose layout the trials replace
    devices: int
    plans: tuple[Plan, ...]  # sorted by predicted step; the first is the planner's choice
    legal: int  # number of legal layouts before the space was limited
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def index(self, layout: Layout) -> int | None:
        """Return the index of a layout, or None if the space does not contain it."""
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
    """Return the space of legal layouts that fit into memory.

    It has at most `most` layouts. Their predicted steps take at most `within` times the shortest predicted step. Raises
    ConfigError if there is none.
    """
    fixed = {"gradient_wire": config.precision.gradient_wire, **fixed}
    shared = {
        "dtype": config.precision.dtype,
        "optimizer": config.optimizer.name,
    }
    layouts = enumerate_layouts(
        config.model,
        devices,
        config.batch.global_batch,
        rates.node_devices,
        fixed,
        tp_max=tp_max,
        **shared,
    )
    # the search does not vary `data_shard`
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
        fixes = f", --fix {fixed_words(fixed)}" if fixed else ""
        raise ConfigError(
            f"{what} (global batch {config.batch.global_batch}{fixes})",
            "use another number of nodes, or fix fewer values (--fix)",
            "tune",
        )
    seconds = step_s(config.model, fitting, rates)
    order = np.argsort(seconds, kind="stable")
    best = [fitting.row(index) for index in order if seconds[index] <= within * seconds[order[0]]]
    legal = [layout for layout in best if not plan_problems(laid_out(config, layout), devices)][:most]
    plans = [simulate_layout(config.model, layout, rates) for layout in legal]
    plans = sorted((plan for plan in plans if plan.peak_bytes <= plan.limit_bytes), key=preference)
    # Apply the limit again to the simulated steps, which differ from the steps by the formula.
    slowest_s = within * min((plan.step_s for plan in plans), default=0.0)
    plans = [plan for plan in plans if plan.step_s <= slowest_s]
    return Space(config, devices, tuple(plans), len(fitting), fixed)


def laid_out(config: RunConfig, layout: Layout) -> RunConfig:
    """Return the run configuration with its layout replaced by `layout`."""
    return build(RunConfig, merge(config.model_dump(mode="json"), run_keys(layout)))


def features(plans: Sequence[Plan]) -> np.ndarray:
    """Return the Gaussian process's coordinates: one row per layout, columns with mean 0 and standard deviation 1.

    The columns are the layout's choices and the parts of its simulated step. Because of the parts, one trial changes
    the expectation for many layouts. For example, if messages cost more than predicted, every layout is slower in
    proportion to its share of messages. The predicted step is a column too, so that errors that grow with it can be
    learnt from a few trials.

    The pipeline bubble enters as -log(1 - bubble). A single coefficient then describes a machine on which the bubble
    costs nothing. The number of passes per step enters as a logarithm, and stands for the host's cost per pass.
    """
    columns: list[np.ndarray] = []
    for name in CHOICES:
        values = [getattr(plan.layout, name) for plan in plans]
        if isinstance(values[0], str):
            columns += [
                np.array([value == option for value in values], dtype=float) for option in sorted(set(values))[1:]
            ]
        else:
            # 1 is added if a column has False or 0, because log2 is not defined there
            columns.append(np.log2(np.array(values, dtype=float) + (min(values) < 1)))
    columns += [np.array(column) for column in zip(*(_shares(plan) for plan in plans), strict=True)]
    columns.append(np.log([plan.step_s for plan in plans]))
    table = np.stack(columns, axis=1)
    spread = table.std(axis=0)
    return (table - table.mean(axis=0))[:, spread > 1e-12] / spread[spread > 1e-12]


def _shares(plan: Plan) -> tuple[float, ...]:
    """Return the parts of the simulated step as shares, the used share of memory, and the passes per rank.

    The parts are pipeline waiting, messages, gradient sums with gathers, and optimizer.
    """
    simulated = plan.simulated
    passes = plan.layout.microbatches * plan.layout.chunks
    bubble = simulated.bubble * simulated.pipeline_s / plan.step_s
    return (
        -math.log(1 - bubble),
        2 * simulated.message_s * passes / plan.step_s,
        (simulated.reduce_s + simulated.gather_s) / plan.step_s,
        simulated.optimizer_s / plan.step_s,
        plan.peak_bytes / plan.limit_bytes,
        math.log2(passes),
    )
