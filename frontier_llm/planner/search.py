"""Search for the parallel layouts with the shortest training step.

The search enumerates the legal layouts and drops those that exceed the device's memory. It computes the step time of
the others in closed form. The fastest of them are the finalists. Their pipelines are simulated action by action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.parameters import StageSpec
from frontier_llm.blueprint.work import hardware_flops_per_token, model_flops_per_token
from frontier_llm.config import RECOMPUTE, ModelConfig
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.candidates import SEARCHED, enumerate_layouts
from frontier_llm.planner.costs.layouts import Layouts
from frontier_llm.planner.costs.memory import memory_by_rank, peak_memory
from frontier_llm.planner.costs.seconds import times
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.pipeline import SimulatedStep, simulate_step
from frontier_llm.schedule import v_names
from frontier_llm.topology.expert_nodes import over_nodes
from frontier_llm.topology.grid import AXIS_ORDERS
from frontier_llm.topology.plan import split_layers
from frontier_llm.units import GIB

TARGET_TOKENS = 16 * 2**20  # tokens of the default global batch of a large machine
DEVICE_TOKENS = 128 * 2**10  # most tokens per device of the default global batch, so that a step takes seconds
WARN_SHARE = 0.95  # share of the device's memory above which the report warns about a plan
FINALISTS = 8
NEAR = 1.06  # After three finalists, the next layout's closed-form step must be within this factor of the best.
# Share of a step below which a difference between two plans is not significant. Predictions are 3-6 % off
# (docs/benchmarks/planner.md).
RESOLUTION = 0.03
# numbers of pieces into which a tensor-parallel product may be cut; with 8 pieces each would be too small for the
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
    memory: tuple[dict[str, float], ...]  # for each pipeline rank: purpose → bytes
    limit_bytes: float
    closed_form_s: float
    binding: str = ""

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
    def tight(self) -> bool:
        """True if the memory of the fullest rank is within 5 % of the device's memory, which causes a warning."""
        return self.peak_bytes > WARN_SHARE * self.limit_bytes


@dataclass(frozen=True)
class Search:
    """Result of a search."""

    model: ModelConfig
    nodes: int
    global_batch: int
    legal: int
    fitting: int
    dominated: int
    plans: tuple[Plan, ...]  # best first; empty if nothing fits
    smallest_bytes: float  # lowest memory per device of a legal layout
    rejected: tuple[str, ...] = ()
    across: Plan | None = None  # best layout whose tensor-parallel groups span nodes, if requested
    fixed: Mapping[str, Any] = field(default_factory=dict)
    finalists: int = 0  # number of simulated plans; `plans` may be cut to the plans of the report

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
    devices = nodes * rates.node_devices
    tp_max = max(rates.node_devices, fixed.get("tp", 1))

    def legal(tp_max: int) -> Layouts:
        layouts = enumerate_layouts(
            model,
            devices,
            global_batch,
            rates.node_devices,
            fixed,
            tp_max=tp_max,
            **shared,
        )
        layouts = over_nodes(model, layouts, rates, fixed.get("expert_all_to_all", "auto"))
        if not rates.one_in_flight or "data_shard" in fixed:
            return layouts
        # FSDP may have no second communicator here (topology.engine_rules). It is proposed only if it is requested.
        zero = layouts.sharding != "weights"
        alone = (layouts.tp == 1) & (layouts.cp == 1) & (layouts.ep == 1) & (layouts.data_shard == 0)
        allowed = zero | alone if "sharding" in fixed else zero
        return layouts.where(allowed) if np.any(allowed) else layouts

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
    plans = _finalists(model, fitting, seconds, memory[fits] > WARN_SHARE * rates.memory_bytes, rates)
    if fixed.get("schedule") == SEARCHED:
        plans = sorted((_searched(plan, rates) for plan in plans[:3]), key=preference)
    plans = [replace(plan, binding=_binding(plan, layouts, fitting)) for plan in plans]
    wide = legal(8 * rates.node_devices) if cross_node else layouts
    return replace(
        result,
        dominated=_dominated(seconds, memory[fits]),
        plans=tuple(plans),
        finalists=len(plans),
        rejected=(*_rejections(layouts, memory, fits, rates), *_other_contexts(fitting, seconds)),
        across=_best_across(model, rates, wide) if cross_node else None,
    )


def _finalists(
    model: ModelConfig,
    fitting: Layouts,
    seconds: np.ndarray,
    tight: np.ndarray,
    rates: Rates,
) -> list[Plan]:
    """Return the simulated finalists, best first.

    For each combination of tp, pp, microbatch size and schedule, only the layout with the shortest closed-form step is
    simulated. Layouts within 5 % of the memory limit count as a combination of their own. The simulations end after
    FINALISTS layouts or ACTION_BUDGET actions.
    """
    recompute = np.select([fitting.recompute == name for name in RECOMPUTE], range(len(RECOMPUTE)))
    order = np.lexsort((np.equal(fitting.axis_order, AXIS_ORDERS[1]), recompute, np.asarray(fitting.chunks), seconds))
    seen: set[tuple[Any, ...]] = set()
    plans: list[Plan] = []
    spent = 0
    for index in order:
        layout = fitting.row(index)
        variant = (layout.tp, layout.pp, layout.micro_batch, layout.schedule, bool(tight[index]))
        if variant in seen:
            continue
        seen.add(variant)
        far = seconds[index] > NEAR * seconds[order[0]]
        if plans and (len(plans) >= FINALISTS or (far and len(plans) >= 3) or spent > ACTION_BUDGET):
            break
        plan = simulate_layout(model, in_chunks(model, layout, rates), rates)
        if plan.peak_bytes > rates.memory_bytes:
            continue  # the real stages can need more memory than the even split that the closed form assumes
        spent += plan.simulated.timeline.schedule.length
        plans.append(plan)
    return sorted(plans, key=preference)


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


def preference(plan: Plan) -> float:
    """Return the sort key of a plan: the seconds of its step, times 1 + RESOLUTION if the plan is risky.

    FSDP is risky because the overlap of its communication is estimated and not simulated. A plan within 5 % of the
    device's memory is risky because it runs out of memory if the allocator needs more than estimated.
    """
    return plan.step_s * (1 + RESOLUTION if plan.layout.sharding == "weights" or plan.tight else 1.0)


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
    """Return the limits of a plan: a tp or cp degree that memory requires, and the largest cost besides arithmetic."""
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
    """Return cause → share of the step, for the causes that are not the model's arithmetic."""
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


def _rejections(layouts: Layouts, memory: np.ndarray, fits: np.ndarray, rates: Rates) -> list[str]:
    """Return lines with the groups of layouts that exceed the device's memory, and how many layouts each group has."""
    lines = []
    for axis in ("tp", "cp"):
        for degree in np.unique(getattr(layouts, axis)):
            family = getattr(layouts, axis) == degree
            if not np.any(fits & family):
                needs = f"{memory[family].min() / GIB:.1f} of {rates.memory_bytes / GIB:.0f} GiB"
                lines.append(
                    f"{axis.upper()}{degree}: none of {int(family.sum())} layouts fits; the smallest needs {needs}"
                )
    families: dict[str, Any] = {
        "without recomputation": layouts.recompute == "none",
        "with selective recomputation": layouts.recompute == "selective",
    }
    if np.any(layouts.cp > 1):
        families["without context parallelism"] = layouts.cp == 1
    for name, family in families.items():
        out = int((family & ~fits).sum())
        if out:
            lines.append(f"{name} {out} of {int(family.sum())} layouts exceed {rates.memory_bytes / GIB:.0f} GiB")
    return lines


def _other_contexts(fitting: Layouts, seconds: np.ndarray) -> list[str]:
    """Return lines that compare the best layout with the other algorithms of context-parallel attention.

    Each line gives the fastest layout of one algorithm, or without context parallelism, and how much longer it takes.

    The list is empty if the best layout has no context parallelism.
    """
    best = fitting.row(int(np.argmin(seconds)))
    if best.cp == 1:
        return []
    lines = []
    for way in np.unique(fitting.context_attention[fitting.context_attention != best.context_attention]):
        family = fitting.context_attention == way
        fastest = fitting.where(family).row(int(np.argmin(seconds[family])))
        words = f"TP{fastest.tp} CP{fastest.cp} PP{fastest.pp} DP{fastest.dp}, recompute {fastest.recompute}"
        name = "CP1" if fastest.cp == 1 else f"attention by {way}"
        lines.append(
            f"{name}: the fastest layout that fits, {words}, takes "
            f"{100 * (seconds[family].min() / seconds.min() - 1):.1f} % longer"
        )
    return lines


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


def smallest_machine(model: ModelConfig, rates: Rates) -> int | None:
    """Return the smallest number of nodes on which a layout fits into memory, or None if none fits.

    Powers of two up to the size of the machine are tried.
    """
    for number in (2**power for power in range(15) if 2**power <= rates.nodes):
        batch = default_global_batch(model, number, rates.node_devices)
        layouts = enumerate_layouts(
            model,
            number * rates.node_devices,
            batch,
            rates.node_devices,
            {"recompute": "full", "sharding": "optimizer"},
        )
        if len(layouts) and np.any(peak_memory(model, layouts, rates) <= rates.memory_bytes):
            return number
    return None
