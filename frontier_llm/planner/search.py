"""Search for the parallel layouts with the shortest training step.

The search enumerates the legal layouts and drops those that exceed the device's memory. It computes the step time of
the remaining layouts in closed form. The layouts with the shortest times are the finalists. Their pipelines are
simulated action by action.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.parameters import StageSpec
from frontier_llm.blueprint.work import hardware_flops_per_token, model_flops_per_token
from frontier_llm.config import RECOMPUTE, ModelConfig
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.candidates import SEARCHED, enumerate_layouts, runnable_layouts
from frontier_llm.planner.choice import preference, ranked, with_slow, with_slow_step
from frontier_llm.planner.costs.layouts import Layouts, by_schedule
from frontier_llm.planner.costs.memory import memory_by_rank, peak_memory
from frontier_llm.planner.costs.seconds import times
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.pipeline import SimulatedStep, simulate_step
from frontier_llm.planner.rejected import other_contexts, rejections
from frontier_llm.schedule import one_end, v_names
from frontier_llm.topology.grid import AXIS_ORDERS
from frontier_llm.topology.plan import split_layers
from frontier_llm.units import GIB

TARGET_TOKENS = 16 * 2**20  # tokens of the default global batch of a large machine.
# Largest number of tokens per device in the default global batch; with it a step takes seconds
DEVICE_TOKENS = 128 * 2**10
WARN_SHARE = 0.95  # share of the device's memory above which the report warns about a plan
FINALISTS = 8
# The closed form assumes an even split of the layers, and a rank of the real split can need 3 % more memory.
SAFE_SHARE = 0.97
SAFE_SCHEDULES = 2  # number of schedules whose fastest layout within `safe_bytes` is simulated
NEAR = 1.06  # After three finalists, a further layout's closed-form step may be at most this factor times the shortest.
# Numbers of pieces into which a tensor-parallel product may be cut; with 8 pieces each would be too small for the
# matrix units
TENSOR_CHUNKS = (1, 2, 4)
ACTION_BUDGET = 260_000  # actions of all simulated schedules together, after which a search simulates no further layout


@dataclass(frozen=True)
class Plan:
    """One layout with its simulated step and its memory."""

    model: ModelConfig
    layout: Layout
    stages: tuple[StageSpec, ...]
    simulated: SimulatedStep
    memory: tuple[dict[str, float], ...]  # one mapping per pipeline rank: purpose → bytes
    limit_bytes: float  # memory of the device
    closed_form_s: float  # seconds of the step in closed form
    binding: str = ""  # the limits of the plan as text (`_binding`)
    safe_bytes: float = np.inf  # memory up to which a plan is expected to run (`Rates.safe_bytes`)
    slow_s: float = 0.0  # seconds of the step with the slow values of the constants (`Rates.slow`); 0: not computed

    @property
    def step_s(self) -> float:
        """Simulated seconds of one training step."""
        return self.simulated.step_s

    @property
    def step_tokens(self) -> int:
        """Tokens of one step over all replicas."""
        return self.layout.global_batch * self.model.sequence_length

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second of one device."""
        return self.step_tokens / self.step_s / self.layout.devices

    @property
    def peak_bytes(self) -> float:
        """Bytes on the pipeline rank that needs the most memory."""
        return max(sum(lines.values()) for lines in self.memory)

    @property
    def is_safe(self) -> bool:
        """True if the fullest rank needs at most `safe_bytes`, the memory up to which a plan is expected to run."""
        return self.peak_bytes <= self.safe_bytes

    @property
    def tight(self) -> bool:
        """True if the memory of the fullest rank is within 5 % of the device's memory, which causes a warning."""
        return self.peak_bytes > WARN_SHARE * self.limit_bytes


@dataclass(frozen=True)
class Search:
    """Result of a search."""

    model: ModelConfig
    nodes: int
    global_batch: int
    legal: int  # number of legal layouts
    fitting: int  # number of legal layouts that fit into memory
    dominated: int  # number of fitting layouts to which another layout is superior (`_dominated`)
    plans: tuple[Plan, ...]  # the choice first, then by speed; empty if nothing fits
    smallest_bytes: float  # lowest memory per device of a legal layout
    rejected: tuple[str, ...] = ()  # lines of the report about layouts that were not chosen
    across: Plan | None = None  # best layout whose tensor-parallel groups span nodes, if requested
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that the user has fixed, with their values
    finalists: int = 0  # number of simulated plans; `plans` may be cut to the plans of the report.
    shared: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the search: dtype and optimizer
    # Best plan that needs at most `safe_bytes`; None if the choice is such a plan, or if there is none
    safe: Plan | None = None

    @property
    def best(self) -> Plan:
        """The planner's choice."""
        return self.plans[0]


def default_global_batch(model: ModelConfig, nodes: int, node_devices: int) -> int:
    """Return the default number of sequences per step: about 16 Mi tokens, and at most 128 Ki tokens per device.

    The number is `nodes` times a power of two, so that most data-parallel degrees divide it.
    """
    tokens = min(TARGET_TOKENS, DEVICE_TOKENS * nodes * node_devices)
    per_node = tokens / model.sequence_length / nodes
    return int(nodes * 2 ** max(0, round(float(np.log2(per_node)))))


def simulate_layout(model: ModelConfig, layout: Layout, rates: Rates, counts: tuple[int, ...] | None = None) -> Plan:
    """Return the plan of one layout: its simulated step and the memory of each pipeline rank.

    `counts` has the number of layers of each virtual stage. None means the split that balances their work.
    """
    stages = split_layers(model, layout.pp * layout.chunks, counts)
    simulated = simulate_step(model, layout, rates, stages)
    memory = memory_by_rank(model, layout, rates, stages)
    return Plan(
        model=model,
        layout=layout,
        stages=stages,
        simulated=simulated,
        memory=memory,
        limit_bytes=rates.memory_bytes,
        safe_bytes=rates.safe_bytes,
        closed_form_s=float(step_s(model, layout, rates)),
    )


def search(
    model: ModelConfig,
    rates: Rates,
    nodes: int,
    global_batch: int,
    fixed: Mapping[str, Any] | None = None,
    *,
    cross_node: bool = False,
    **shared: str,
) -> Search:
    """Search for the best layouts of `model` on `nodes` nodes.

    `Search.legal` is 0 if no layout is legal, and `Search.plans` is empty if no legal layout fits.

    Args:
        model: the model.
        rates: rates of the machine and its stack.
        nodes: number of nodes.
        global_batch: sequences per step.
        fixed: field of `Layout` → value that all layouts must have, as returned by `parse_fixed`.
        cross_node: also search for the best layout whose tensor group spans nodes.
        shared: further fields that all layouts have, for example dtype and optimizer.
    """
    fixed = dict(fixed or {})
    tp_max = max(rates.node_devices, fixed.get("tp", 1))

    def legal(tp_max: int) -> Layouts:
        return runnable_layouts(model, rates, nodes, global_batch, fixed, tp_max=tp_max, **shared)

    layouts = legal(tp_max)
    nothing = Search(
        model=model,
        nodes=nodes,
        global_batch=global_batch,
        legal=0,
        fitting=0,
        dominated=0,
        plans=(),
        smallest_bytes=0.0,
        fixed=fixed,
        shared=shared,
    )
    if len(layouts) == 0:
        return nothing
    memory = peak_memory(model, layouts, rates)
    fits = memory <= rates.memory_bytes
    result = replace(
        nothing,
        legal=len(layouts),
        fitting=int(fits.sum()),
        smallest_bytes=float(memory.min()),
    )
    if not result.fitting:
        return result
    fitting = layouts.where(fits)
    seconds = step_s(model, fitting, rates)
    plans = _finalists(model, fitting, seconds, memory[fits], rates)
    if not plans:  # the real stages of all finalists need more memory than their even split
        plans = [simulate_layout(model, fitting.row(int(np.argmin(memory[fits]))), rates)]
        if plans[0].peak_bytes > rates.memory_bytes:
            return replace(result, fitting=0, smallest_bytes=plans[0].peak_bytes)
    if fixed.get("schedule") == SEARCHED:
        plans = [_searched(plan, rates) for plan in sorted(plans, key=preference)[:3]]
    plans = [with_slow_step(replace(plan, binding=_binding(plan, layouts, fitting)), rates) for plan in plans]
    plans = ranked(plans)
    wide = legal(8 * rates.node_devices) if cross_node else layouts
    return replace(
        result,
        dominated=_dominated(seconds, memory[fits]),
        plans=tuple(plans),
        finalists=len(plans),
        safe=_safe(plans),
        rejected=(*rejections(layouts, memory, fits, rates), *other_contexts(fitting, seconds, plans[0].layout)),
        across=_best_across(model, rates, wide) if cross_node else None,
    )


def _finalists(
    model: ModelConfig,
    fitting: Layouts,
    seconds: np.ndarray,
    memory: np.ndarray,
    rates: Rates,
) -> list[Plan]:
    """Return the simulated finalists.

    For each combination of tp, pp, microbatch size and schedule, only the layout with the shortest closed-form step is
    simulated. If its real stages do not fit, the fastest layout that needs enough less memory follows. Layouts within
    5 % of the memory limit form separate combinations. The simulations end after FINALISTS layouts or ACTION_BUDGET
    actions. Then the layouts of `_special` are added.
    """
    recompute = np.select([fitting.recompute == name for name in RECOMPUTE], range(len(RECOMPUTE)))
    order = np.lexsort((np.equal(fitting.axis_order, AXIS_ORDERS[1]), recompute, np.asarray(fitting.chunks), seconds))
    tight = memory > WARN_SHARE * rates.memory_bytes
    simulated: set[int] = set()
    # combination → closed-form memory up to which its next layout is simulated; 0: a layout that fits is simulated
    room: dict[tuple[Any, ...], float] = {}
    plans: list[Plan] = []
    spent = 0

    def simulate(index: int) -> Plan:
        """Simulate a layout, and add it to `plans` if its real stages fit."""
        simulated.add(index)
        plan = simulate_layout(model, in_chunks(model, fitting.row(index), rates), rates)
        if plan.peak_bytes <= rates.memory_bytes:
            plans.append(plan)
        return plan

    for index in order:
        layout = fitting.row(index)
        variant = (layout.tp, layout.pp, layout.micro_batch, layout.schedule, bool(tight[index]))
        if memory[index] > room.get(variant, np.inf):
            continue
        far = seconds[index] > NEAR * seconds[order[0]]
        if plans and (len(plans) >= FINALISTS or (far and len(plans) >= 3) or spent > ACTION_BUDGET):
            break
        plan = simulate(int(index))
        if plan.peak_bytes <= rates.memory_bytes:
            spent += plan.simulated.timeline.schedule.length
            room[variant] = 0.0
        else:  # the real stages can need more memory than the even split that the closed form assumes
            room[variant] = memory[index] * rates.memory_bytes / plan.peak_bytes
    for index in _special(model, fitting, seconds, memory, order, rates):
        if index not in simulated:
            simulate(index)
    return plans


def _special(
    model: ModelConfig,
    fitting: Layouts,
    seconds: np.ndarray,
    memory: np.ndarray,
    order: np.ndarray,
    rates: Rates,
) -> list[int]:
    """Return the indices of layouts that are finalists for another reason than their step time.

    These are the fastest layout with the slow constants, the fastest FSDP layout, and the fastest layouts of
    SAFE_SCHEDULES schedules among the layouts that need at most `safe_bytes`.
    """
    usable = np.ones(len(fitting), dtype=bool)
    if rates.one_in_flight:
        # the closed form does not contain the time that messages of interleaved stages wait for each other
        usable = (fitting.chunks == 1) | by_schedule(fitting, one_end).astype(bool)
    found = []
    if rates.slow and usable.any():
        slow_s = np.where(usable, step_s(model, fitting, with_slow(rates)), np.inf)
        found.append(int(np.argmin(slow_s)))
    candidates = order[usable[order]]
    sharded = np.equal(fitting.sharding, "weights")
    found += candidates[sharded[candidates]][:1].tolist()
    within = candidates[(memory <= SAFE_SHARE * rates.safe_bytes)[candidates]]
    _, first = np.unique(fitting.schedule[within], return_index=True)
    if rates.safe_bytes < rates.memory_bytes:
        found += within[np.sort(first)[:SAFE_SCHEDULES]].tolist()
    return found


def _safe(plans: list[Plan]) -> Plan | None:
    """Return the best plan that needs at most `safe_bytes`, if the choice needs more memory."""
    if not plans or plans[0].is_safe:
        return None
    return next(iter(ranked([plan for plan in plans if plan.is_safe])), None)


def in_chunks(model: ModelConfig, layout: Layout, rates: Rates) -> Layout:
    """Return the layout with the `tensor_chunks` that make its layers fastest.

    `tensor_chunks` stays unchanged if the machine file has no `chunk_overlap`, which `bench comm --emit-machine`
    measures.
    """
    if layout.tp == 1 or not rates.chunk_overlap:
        return layout
    rows = model.sequence_length // layout.cp // layout.sequence_shards
    options = (replace(layout, tensor_chunks=pieces) for pieces in TENSOR_CHUNKS if rows % pieces == 0)
    return min(options, key=lambda option: sum(times(model, option, rates).block.both(option.microbatches, rates)))


def _searched(plan: Plan, rates: Rates) -> Plan:
    """Return a V-shaped plan with the fastest of all V schedules that fit.

    The paper (Qi et al. 2024) derives V-Min, V-Half and ZB-V for forward, input-gradient and weight-gradient passes of
    equal time. With a plan's real times, other delays between the passes of neighbouring stages may be faster. The run
    file stores the name of the chosen schedule, for example `v:2,2,2,2`, so the run does not search again.
    """
    others = (simulate_layout(plan.model, replace(plan.layout, schedule=name), rates) for name in v_names())
    return min([plan, *(one for one in others if one.peak_bytes <= rates.memory_bytes)], key=preference)


def _dominated(seconds: np.ndarray, memory: np.ndarray) -> int:
    """Return the number of dominated layouts.

    A layout is dominated if another layout is at least as fast and needs at most as much memory. Among several equal
    layouts, one is not counted.
    """
    order = np.lexsort((memory, seconds))
    best_before = np.minimum.accumulate(np.concatenate([[np.inf], memory[order][:-1]]))
    return int((memory[order] >= best_before).sum())


def _binding(plan: Plan, legal: Layouts, fitting: Layouts) -> str:
    """Return the limits of a plan as text: a tp or cp degree that memory requires, and the largest cost besides
    arithmetic.
    """
    reasons = []
    for axis in ("tp", "cp"):
        degree = getattr(plan.layout, axis)
        if np.any(getattr(legal, axis) < degree) and not np.any(getattr(fitting, axis) < degree):
            reasons.append(f"{axis.upper()}{degree}: {plan.limit_bytes / GIB:.0f} GiB")
    shares = overheads(plan)
    name = max(shares, key=lambda key: shares[key])
    reasons.append(f"{name} {100 * shares[name]:.1f} %")
    if plan.tight:
        reasons.append("memory within 5 %")
    return ", ".join(reasons)


def overheads(plan: Plan) -> dict[str, float]:
    """Return cause → fraction of the step time, for the causes that are not the model's arithmetic."""
    simulated = plan.simulated
    layout = plan.layout
    messages = 2 * simulated.message_s * layout.microbatches * layout.chunks if layout.pp > 1 else 0.0
    waiting = simulated.pipeline_s - max(simulated.busy_s)
    return {
        "bubble": max(waiting - messages, 0.0) / plan.step_s,
        "p2p": min(messages, max(waiting, 0.0)) / plan.step_s,
        "gradient reduction": (simulated.reduce_s + simulated.gather_s) / plan.step_s,
        "optimizer": simulated.optimizer_s / plan.step_s,
    }


def _best_across(model: ModelConfig, rates: Rates, layouts: Layouts) -> Plan | None:
    """Return the best layout whose tensor group spans nodes, or None if none fits."""
    layouts = layouts.where(layouts.tp > rates.node_devices)
    if len(layouts) == 0:
        return None
    fitting = layouts.where(peak_memory(model, layouts, rates) <= rates.memory_bytes)
    if len(fitting) == 0:
        return None
    return simulate_layout(model, fitting.row(int(np.argmin(step_s(model, fitting, rates)))), rates)


def utilisations(plan: Plan, rates: Rates) -> dict[str, float]:
    """Return MFU and HFU with full attention (Megatron's convention), and MFU with causal attention."""
    speed = plan.tokens_per_s_per_device / rates.peak_flops
    return {
        "mfu": model_flops_per_token(plan.model) * speed,
        "hfu": hardware_flops_per_token(plan.model, plan.layout) * speed,
        "mfu_causal": model_flops_per_token(plan.model, causal=True) * speed,
    }


def memory_summary(plan: Plan) -> tuple[int, dict[str, float]]:
    """Return the pipeline rank that needs the most memory, and its memory: purpose → bytes."""
    rank = max(range(len(plan.memory)), key=lambda index: sum(plan.memory[index].values()))
    return rank, plan.memory[rank]


def smallest_machine(
    model: ModelConfig, rates: Rates, fixed: Mapping[str, Any] | None = None, *, above: int = 0, **shared: Any
) -> int | None:
    """Return the smallest number of nodes on which a layout fits into memory, or None if none fits.

    Powers of two above `above` and up to the size of the machine are tried. `fixed` and `shared` are used as in
    `search`.
    """
    fixed = {"recompute": "full", "sharding": "optimizer", **(fixed or {})}
    for number in (2**power for power in range(15) if above < 2**power <= rates.nodes):
        batch = default_global_batch(model, number, rates.node_devices)
        layouts = enumerate_layouts(
            model,
            number * rates.node_devices,
            batch,
            rates.node_devices,
            fixed,
            tp_max=max(rates.node_devices, fixed.get("tp", 1)),
            **shared,
        )
        if len(layouts) and np.any(peak_memory(model, layouts, rates) <= rates.memory_bytes):
            return number
    return None


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the search for reference cycles.

    A search or a large schedule creates hundreds of thousands of tuples that live until its end, and hardly any cycle.
    The repeated search over them takes a third to a half of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
