"""Best plans of common kinds of layouts that were not chosen: tensor parallelism over a whole node, and FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from frontier_llm.machine.rates import Rates
from frontier_llm.planner.candidates import runnable_layouts
from frontier_llm.planner.costs.memory import peak_memory
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.search import Plan, Search, simulate_layout


@dataclass(frozen=True)
class Alternative:
    """A kind of layout that was not chosen, with its best plan. `reason` states why there is no plan."""

    name: str
    plan: Plan | None
    reason: str = ""


def alternatives(outcome: Search, rates: Rates) -> list[Alternative]:
    """Return the kinds of layouts that the choice does not belong to. A kind is left out if `--fix` excludes it."""
    return list(_alternatives(outcome, rates))


def _alternatives(outcome: Search, rates: Rates) -> Iterator[Alternative]:
    chosen = outcome.best.layout
    node = rates.node_devices
    if node > 1 and chosen.tp != node and "tp" not in outcome.fixed:
        yield _best(f"TP{node}", outcome, rates, {"tp": node})
    if chosen.sharding == "weights" or outcome.fixed.keys() & {"sharding", "data_shard"}:
        return
    kind: dict[str, object] = {"sharding": "weights"}
    if rates.one_in_flight:
        # with one communication in flight, FSDP allows no other communicator (topology.engine_rules)
        kind |= {"tp": 1, "cp": 1, "ep": 1, "data_shard": 0}
    if all(outcome.fixed.get(field, value) == value for field, value in kind.items()):
        yield _best("FSDP", outcome, rates, kind)


def _best(name: str, outcome: Search, rates: Rates, kind: dict[str, object]) -> Alternative:
    """Return the simulated plan of the layout of this kind with the shortest closed-form step."""
    chosen = outcome.best.layout
    layouts = runnable_layouts(
        outcome.model,
        rates,
        outcome.nodes,
        outcome.global_batch,
        {**outcome.fixed, **kind},
        dtype=chosen.dtype,
        optimizer=chosen.optimizer,
    )
    if len(layouts) == 0:
        return Alternative(name, None, "no such layout divides the model, the batch and the devices")
    fitting = layouts.where(peak_memory(outcome.model, layouts, rates) <= rates.memory_bytes)
    if len(fitting) == 0:
        return Alternative(name, None, "no such layout fits the memory of a device")
    fastest = int(np.argmin(step_s(outcome.model, fitting, rates)))
    return Alternative(name, simulate_layout(outcome.model, fitting.row(fastest), rates))
