"""The roomier plan of a run: the fastest layout that leaves clearly more of the device's memory unused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from frontier_llm.config import RunConfig, phases_of
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.emit import as_overrides, layout_keys
from frontier_llm.planner.search import Plan, search

FULL_SHARE = 54 / 64  # share of the device's memory above which a layout is called full
ROOM_SHARE = 0.9  # a roomier plan needs at most this share of the memory of the run's own plan


def roomier_plan(config: RunConfig, nodes: int, devices: int, own: Plan) -> Plan | None:
    """Return the fastest layout on `devices` devices of `nodes` nodes that is roomier than the run's own plan.

    Returns None if there is none.

    The global batch, the model, the precision and the engine (native or FSDP) are those of the run. The layout needs
    at most FULL_SHARE of the device's memory, and ROOM_SHARE of the memory of `own`.
    """
    numbers = rates(load_machine(config.machine))
    limit_bytes = min(FULL_SHARE * numbers.memory_bytes, ROOM_SHARE * own.peak_bytes)
    longest = max(phases_of(config), key=lambda phase: phase.config.model.sequence_length).config
    outcome = search(
        longest.model,
        replace(numbers, memory_bytes=limit_bytes, node_devices=devices // nodes),
        nodes,
        longest.batch.global_batch,
        {"sharding": "weights" if own.layout.sharding == "weights" else "optimizer"},
        dtype=longest.precision.dtype,
        optimizer=longest.optimizer.name,
    )
    if not outcome.plans:
        return None
    fastest = min(outcome.plans, key=lambda plan: plan.step_s)
    return replace(fastest, limit_bytes=numbers.memory_bytes)


def plan_overrides(config: RunConfig, roomier: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the overrides of both plans: the run's own values of the layout's keys, and those of the roomier plan."""
    machine = load_machine(config.machine)
    keys = layout_keys(roomier, machine, rates(machine))
    own: Mapping[str, Mapping[str, Any]] = config.model_dump(mode="json")
    own_keys = {section: {key: own[section][key] for key in values} for section, values in keys.items()}
    return as_overrides(own_keys), as_overrides(keys)
