"""Errors of `frontier-llm plan` if its search has found no plan. An error states the reason, and a change with which a
plan exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frontier_llm.blueprint.layout import Layout, run_keys
from frontier_llm.config import ModelConfig, RunConfig, build
from frontier_llm.config.load import merge
from frontier_llm.errors import ConfigError, LayoutError, Problem, nearest
from frontier_llm.machine.load import (
    load_machine,
    machine_names,
    own_stack,
    rates,
)
from frontier_llm.machine.rates import Rates
from frontier_llm.machine.schema import Machine
from frontier_llm.planner.candidates import SEARCHED, fixed_words, legal_node_counts
from frontier_llm.planner.search import Search, smallest_machine
from frontier_llm.topology.plan import plan_problems
from frontier_llm.units import GIB, plural


def check_found(outcome: Search, machine: Machine, numbers: Rates) -> None:
    """Raise LayoutError if no layout is legal or none fits into memory. The error names a change with which a plan
    exists.
    """
    if outcome.plans:
        return
    if not outcome.legal:
        raise _nothing_legal(outcome, machine)
    needs = f"{outcome.smallest_bytes / GIB:.1f} GiB"
    has = f"{numbers.memory_bytes / GIB:.0f}"
    if outcome.fixed:
        what = (
            f"none of the {outcome.legal} layouts with these fixed values fits: the smallest needs {needs} per "
            f"device, which has {has}"
        )
        raise LayoutError(what, "fix fewer choices, or use more nodes", "plan --fix")
    nodes = smallest_machine(outcome.model, numbers, above=outcome.nodes, **outcome.shared)
    if nodes is None:
        raise too_big(outcome.model, machine, numbers, **outcome.shared)
    raise LayoutError(
        f"{outcome.model.name} does not fit on {plural(outcome.nodes, 'node')} of {machine.name}: of {outcome.legal} "
        f"legal layouts the smallest needs "
        f"{needs} per device, which has {has}",
        f"use at least {nodes} nodes",
        "plan",
    )


def default_nodes(model: ModelConfig, machine: Machine, numbers: Rates, fixed: Mapping[str, Any], **shared: Any) -> int:
    """Return the smallest power of two of nodes on which the model fits, with the values in `fixed` if possible.

    Raises LayoutError if the model does not fit on the machine. `fixed` and `shared` are used as in `search`.
    """
    nodes = smallest_machine(model, numbers, fixed, **shared) or smallest_machine(model, numbers, **shared)
    if nodes is None:
        raise too_big(model, machine, numbers, **shared)
    return nodes


def _nothing_legal(outcome: Search, machine: Machine) -> LayoutError:
    """Return the error for a search without legal layouts.

    The error names the nearest numbers of nodes and the nearest global batches with a legal layout.
    """
    model = outcome.model
    fixed = fixed_words(outcome.fixed)
    near = legal_node_counts(model, machine.devices_per_node, outcome.nodes, outcome.global_batch, outcome.fixed)
    batches = nearest(
        outcome.global_batch,
        range(outcome.nodes, 4 * outcome.global_batch + outcome.nodes, outcome.nodes),
    )
    counts = " or ".join(map(str, near)) if near else "another number of"
    batch = "" if outcome.global_batch in batches else f", or a global batch such as {' or '.join(map(str, batches))}"
    refused = Problem(
        where="plan",
        what=f"no legal layout of {model.name} ({model.layers} layers, {model.heads} heads) with global batch "
        f"{outcome.global_batch} "
        f"on {plural(outcome.nodes, 'node')} of {machine.devices_per_node} devices"
        + (f" with {fixed}" if fixed else ""),
        fix=f"use {counts} nodes{batch}" + (", or fix fewer choices" if fixed else ""),
    )
    return LayoutError([*broken_rules(outcome, machine.devices_per_node), refused])


def broken_rules(outcome: Search, node_devices: int) -> list[Problem]:
    """Return the problems that the user's fixed values cause. A run without these values does not have these problems.

    The list is empty if the values are legal but outside of the bounds of the search.
    """
    devices = outcome.nodes * node_devices
    given = {
        "model": outcome.model.model_dump(),
        "batch": {"global_batch": outcome.global_batch},
        # the search also prices layouts with tensor parallelism across nodes if the user fixes them
        "parallel": {"cross_node_tensor": True},
    }

    def problems(fixed: Mapping[str, Any]) -> list[Problem]:
        keys = run_keys(_plainest(fixed))
        keys["parallel"]["data"] = fixed.get("dp")  # None: follows from the number of devices
        try:
            return plan_problems(build(RunConfig, merge(given, keys)), devices)
        except ConfigError as error:
            return list(error.problems)

    without = problems({})
    if outcome.fixed:
        return [problem for problem in problems(outcome.fixed) if problem not in without]
    return []


def _plainest(fixed: Mapping[str, Any]) -> Layout:
    """Return a layout with the user's fixed values and the values that they require. All other fields have defaults.

    A fixed schedule is left out unless `chunks` is fixed too, because every schedule accepts some number of chunks.
    """
    free = {"expert_all_to_all"}
    if "chunks" not in fixed or fixed.get("schedule") == SEARCHED:
        free.add("schedule")
    needed: dict[str, Any] = {"sharding": "weights"} if "data_shard" in fixed else {}
    if fixed.get("chunks", 1) > 1:
        needed |= {"schedule": "interleaved", "pp": 2}
    needed |= {field: value for field, value in fixed.items() if field not in free}
    return Layout(**needed)


def too_big(model: ModelConfig, machine: Machine, numbers: Rates, **shared: Any) -> LayoutError:
    """Return the error for a model that does not fit on this machine, even on all of its nodes.

    The error names the smallest other machine on which the model fits. `shared` is used as in `search`.
    """
    homes = []
    for other in (load_machine(name) for name in machine_names() if name != machine.name):
        nodes = smallest_machine(model, rates(other, own_stack(other)), **shared)
        if nodes is not None:
            homes.append((nodes * other.devices_per_node * other.device.memory_gib.value, nodes, other.name))
    fix = "no machine in configs/machines has enough memory; use a smaller model"
    if homes:
        _, nodes, name = min(homes)
        fix = f"use {nodes} nodes of {name}, the smallest machine with enough memory"
    return LayoutError(
        f"{model.name} does not fit on {machine.name}, even on all of its {numbers.nodes} nodes",
        fix,
        "plan",
    )
