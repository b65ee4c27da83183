"""Seconds of a training step in closed form, for one layout or for a table of thousands of layouts.

Pipeline stage i takes t_i = f_i + b_i (forward + backward) per microbatch, and a message takes d. With m microbatches
and v chunks per rank, a step takes

    step = m · T + (sum_i (t_i + 2 d) - T) / v + …,   T = max_i t_i + 2 d       (1F1B: v = 1; interleaved: the ramp
    shrinks by v)

For p equal stages this is exact, with the bubble (p-1)/(v·m). For unequal stages it is within a few percent of the
simulation, with which tests compare it. If messages overlap compute, T is the slowest stage, or the second slowest
stage plus its messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frontier_llm.blueprint.layout import DTYPE_BYTES, Layout
from frontier_llm.config import ModelConfig
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.collectives import collective_s, message_s, small_sum_s
from frontier_llm.planner.costs.kernels import memory_s
from frontier_llm.planner.costs.layouts import Number, by_schedule, cut, ranks_per_node, split
from frontier_llm.planner.costs.parameters import expert_numel, stage_numel
from frontier_llm.planner.costs.seconds import Times, times, waiting_s
from frontier_llm.planner.costs.update import WholeUpdate, whole_update
from frontier_llm.schedule import idle_share, one_end, rule


def p2p_bytes(model: ModelConfig, layouts: Layout, rates: Rates) -> Number:
    """Return the bytes that a tensor-parallel rank sends to the next pipeline stage for one microbatch.

    These are S·B·H / cp elements. With sequence parallelism or Megatron's scatter-gather each tp rank sends its part
    only.
    """
    size = model.sequence_length / layouts.cp * layouts.micro_batch * model.hidden * DTYPE_BYTES[layouts.dtype]
    return np.where(layouts.sequence_parallel | rates.p2p_split, size / layouts.tp, size)


def p2p_s(model: ModelConfig, layouts: Layout, rates: Rates) -> Number:
    """Return the seconds of one message between pipeline neighbours, 0 without a pipeline."""
    place = ranks_per_node(layouts, rates)
    return np.where(
        layouts.pp > 1,
        message_s(rates, p2p_bytes(model, layouts, rates), place.pp_inside, place.pp_sharing),
        0.0,
    )


@dataclass(frozen=True)
class StepTail:
    """Seconds of gradient sum, optimizer update and weight gather that no compute of the pipeline hides."""

    reduce_s: Number
    optimizer_s: Number
    gather_s: Number


def gradient_reduction_s(
    layouts: Layout,
    rates: Rates,
    parameters: Number,
    experts: Number = 0.0,
) -> tuple[Number, Number]:
    """Return the seconds of summing gradients and of gathering weights over the replicas, for one pipeline stage.

    With ZeRO, gradients are summed by a reduce-scatter (by an all-reduce if the stack has `all_reduces_gradients`), and
    weights are gathered by an all-gather. Without ZeRO, gradients are summed by an all-reduce, and the second result is
    0. The collectives run bucket by bucket. `parameters` and `experts` are numbers of elements. The gradients of
    experts are reduced after the gradients of all other parameters, over the experts' replicas.
    """
    place = ranks_per_node(layouts, rates)
    node = rates.node_devices
    together = layouts.ep * layouts.etp
    apart = np.minimum(together, node)  # number of groups of expert replicas in a node
    inside = np.clip(node // apart, 1, layouts.edp)
    reductions = (
        (parameters, layouts.replicas, place.replicas_per_node, place.replicas_sharing),
        (experts, layouts.edp, inside, np.maximum(np.minimum(node, together * layouts.edp) / inside, 1.0)),
    )
    element_bytes = DTYPE_BYTES.get(layouts.gradient_wire, rates.gradient_bytes)

    def seconds(operation: str, size: float) -> Number:
        total: Number = 0.0
        for numel, ranks, per_node, sharing in reductions:
            buckets = np.maximum(numel / rates.bucket_parameters, 1.0) if rates.bucket_parameters else 1.0
            moved = buckets * collective_s(
                rates=rates,
                ranks=ranks,
                per_node=per_node,
                sharing=sharing,
                size_bytes=np.maximum(numel, 1.0) * size / buckets,
                operation=operation,
            )
            total = total + np.where(np.asarray(numel) > 0, moved, 0.0)
        return total

    summed, scattered = (seconds(operation, element_bytes) for operation in ("all_reduce", "reduce_scatter"))
    gathered = seconds("all_gather", DTYPE_BYTES[layouts.dtype])
    sharded = cut(layouts, 1)
    scatters = sharded & (not rates.all_reduces_gradients)
    return np.where(scatters, scattered, summed), np.where(sharded, gathered, 0.0)


def ends_apart(layouts: Layout) -> Number:
    """Return whether the embedding and the head are on different pipeline ranks."""
    return (layouts.pp > 1) & (by_schedule(layouts, one_end) == 0)


def tied_sum_s(model: ModelConfig, layouts: Layout, rates: Rates) -> Number:
    """Return the seconds of summing a tied embedding's gradient over the first and the last stage.

    The sum begins after the last backward, so nothing hides it. Each rank of a stage forms a group with one rank of the
    other stage, and the groups of a node share its NICs.
    """
    if not model.tied_embeddings:
        return 0.0 * layouts.pp
    node = rates.node_devices
    stage = layouts.tp * layouts.cp * np.where(layouts.axis_order == "tp-pp-dp", 1, layouts.dp)
    near = stage * layouts.pp <= node
    numel = model.padded_vocab_size * model.hidden / layouts.tp
    summed_s = collective_s(
        rates=rates,
        ranks=2,
        per_node=np.where(near, 2, 1),
        sharing=np.minimum(stage, node),
        size_bytes=numel * rates.gradient_bytes,
        operation="all_reduce",
    )
    return np.where(ends_apart(layouts), summed_s, 0.0)


def overlap_windows(layouts: Layout) -> Number:
    """Return the amount of backward work that can hide the gradient sum: the work after the first complete gradients.

    The unit is the backward of one microbatch through all chunks of a rank. Without interleaving it is 1, the backward
    of the last microbatch. With interleaving it is the last round. This round has the backwards of pp microbatches
    through all chunks but one, and the backward of one microbatch through the chunk that was left out.
    """
    pp = layouts.pp
    v = layouts.chunks
    return np.minimum((pp * (v - 1) + 1) / v, np.maximum(layouts.microbatches, 1))


def tail(
    layouts: Layout,
    rates: Rates,
    parameters: Number,
    last_backward_s: Number,
    first_forward_s: Number,
    experts: Number = 0.0,
    whole: WholeUpdate | None = None,
) -> StepTail:
    """Return the seconds of gradient sum, update and weight gather that no compute of the pipeline hides.

    If pp is 1, ZeRO-2 reduce-scatters gradients after each microbatch, not once per step.

    Args:
        layouts: one layout or a table.
        rates: rates of the machine.
        parameters: elements of the stage on this rank, without experts.
        last_backward_s: seconds of the last microbatch's backward over the complete stage.
        first_forward_s: seconds of the first microbatch's forward over the complete stage.
        experts: elements of experts of the stage on this rank.
        whole: additional costs of an optimizer that updates complete matrices.
    """
    parameters = parameters + (whole.padding if whole else 0)
    reduce_s, gather_s = gradient_reduction_s(layouts, rates, parameters, experts)
    windows = overlap_windows(layouts)
    # With one communication in flight the next collective of a layer waits for a running gradient sum, so compute hides
    # almost nothing of the sum. In benchmarks/planner/reduction_in_flight.py 95 % of the sum's time is exposed.
    hides_sums = np.where(rates.one_in_flight & meets_inside(layouts), 0.0, windows)
    owned = parameters / np.where(cut(layouts, 1), layouts.shards, 1) + experts / np.where(
        cut(layouts, 1),
        layouts.edp,
        1,
    )
    every = (layouts.sharding == "gradients") & (layouts.pp == 1)
    sharded = cut(layouts, 3)  # gradients are sharded like the state and were communicated layer by layer
    held = np.where(sharded | every, owned, parameters + experts)
    update_s = memory_s(owned * rates.optimizer_bytes, 4, rates) + memory_s(held * 2.0 * rates.gradient_bytes, 2, rates)
    shown_s = exposed_s(reduce_s, hides_sums * last_backward_s, rates.dp_overlap) * np.where(
        every,
        layouts.microbatches,
        1,
    )
    return StepTail(
        reduce_s=np.where(sharded, 0.0, shown_s),
        optimizer_s=update_s + rates.step_s + (whole.seconds if whole else 0.0),
        gather_s=np.where(sharded, 0.0, exposed_s(gather_s, windows * first_forward_s, rates.gather_overlap)),
    )


def sharding_s(block: Times, layouts: Layout, rates: Rates) -> tuple[Number, Number]:
    """Return the (forward, backward) seconds of the collectives that sharded weights need for one block.

    These are all-gathers of weights and a reduce-scatter of gradients. If there are several copies of the weights
    (HSDP), one all-reduce per step over the copies is divided among the microbatches.
    """
    place = ranks_per_node(layouts, rates)
    shards = layouts.shards
    inside = np.minimum(place.replicas_per_node, shards)
    across = np.maximum(place.replicas_per_node // shards, 1)
    copies = layouts.replicas // shards
    devices = place.replicas_per_node * place.replicas_sharing  # number of devices of a node

    def seconds(size_bytes: Number, operation: str, ranks: Number = shards, per_node: Number = inside) -> Number:
        moved_s = collective_s(
            rates=rates,
            ranks=ranks,
            per_node=per_node,
            sharing=np.maximum(devices / per_node, 1.0),
            size_bytes=np.maximum(size_bytes, 1.0),
            operation=operation,
        )
        return np.where((size_bytes > 0) & (ranks > 1), moved_s * rates.sharded_slowdown, 0.0)

    backward_s = seconds(block.gather_again_bytes, "all_gather") + seconds(block.scatter_bytes, "reduce_scatter")
    backward_s = backward_s + seconds(block.scatter_bytes / shards, "all_reduce", copies, across) / layouts.microbatches
    return seconds(block.gather_bytes, "all_gather"), backward_s


def layer_s(block: Times, layouts: Layout, rates: Rates) -> tuple[Number, Number]:
    """Return the (forward, backward) seconds of a layer, including the exposed collectives of sharded weights."""
    computed_s = block.both(layouts.microbatches, rates)
    sharded = cut(layouts, 3)
    if not np.any(sharded):
        return computed_s
    overlap = 0.0 if rates.host_executes else rates.dp_overlap  # a CPU's cores both send and compute
    forward_s, backward_s = (
        compute_s
        + np.where(sharded, exposed_s(moved_s, compute_s, overlap) + waiting_s(meetings, compute_s, rates), 0.0)
        for moved_s, compute_s, meetings in zip(sharding_s(block, layouts, rates), computed_s, (1, 2), strict=True)
    )
    return forward_s, backward_s


def pair_s(block: Times, layouts: Layout, rates: Rates) -> Number:
    """Return the seconds that a layer saves if the forward of one microbatch and the backward of another run as a pair.

    Pairs are described in schedule/actions.py. While one microbatch computes, the other sends its token rows to
    experts. Two of the four all-to-alls overlap attention, and two overlap experts. If a rank may have only one
    communication in flight, attention's own collectives wait for the rows. The two all-to-alls beside attention are
    then counted as not hidden.
    """
    overlap = 0.0 if rates.host_executes else rates.dp_overlap
    ways = np.where(rates.one_in_flight & ((layouts.tp > 1) | (layouts.cp > 1)), 0.5, 1.0)
    rows_s = (block.rows_s, block.rows_backward_s)
    both_s = block.both(layouts.microbatches, rates)
    computed_s = [whole - rows for whole, rows in zip(both_s, rows_s, strict=True)]
    hidden_s = sum(
        np.minimum(rows * overlap, computed) for rows, computed in zip(rows_s, reversed(computed_s), strict=True)
    )
    return np.where(runs_pairs(layouts), ways * hidden_s, 0.0)


def runs_pairs(layouts: Layout) -> Number:
    """Return whether the schedule runs microbatches in pairs (comm.overlap_experts)."""
    return (by_schedule(layouts, lambda name: float(rule(name).pairs)) > 0) & (layouts.ep > 1) & (layouts.pp > 1)


def exposed_s(communication_s: Number, compute_s: Number, overlap: float) -> Number:
    """Return the seconds by which communication prolongs the compute that it overlaps.

    At most the share `overlap` of the communication can be hidden, and at most as many seconds as the compute takes.
    """
    return np.maximum(communication_s * (1 - overlap), communication_s - compute_s)


def stage_layers(model: ModelConfig, layouts: Layout) -> tuple[Number, Number]:
    """Return the numbers of layers of the fullest and of the last pipeline rank.

    Layers are split evenly, and the first ranks have the leftover layers.
    """
    pp = layouts.pp
    layers = model.layers
    most = np.ceil(layers / pp)
    return most, np.where(layers % pp == 0, most, np.floor(layers / pp))


def meets_inside(layouts: Layout) -> Number:
    """Return whether ranks communicate inside a layer: over tp, cp or ep."""
    return (layouts.tp > 1) | (layouts.cp > 1) | (layouts.ep > 1)


def _exposed_messages(layouts: Layout, rates: Rates) -> Number:
    """Return how many message round trips prolong a microbatch if a rank may have one communication in flight.

    The numbers are fitted to `schedule.simulate_one_in_flight`. If layers contain collectives, compute hides none of
    the four messages of a chunk, and chunks wait for each other.
    """
    chunks = layouts.chunks
    waits = meets_inside(layouts) | rates.host_executes
    few = np.where(split(layouts), 0.8, 1.5)

    def waits_of_chunks(name: str) -> float:
        if not one_end(name):
            return 3.5
        return 2.0 if rule(name).idle < 1 / 4 else 3.0  # ZB-V needs as much memory as 1F1B and waits less for messages

    deep = by_schedule(layouts, waits_of_chunks)
    return np.where(chunks > 1, chunks * np.where(waits, deep, 2.0), np.where(waits, 2.0, few))


def between_microbatches_s(layouts: Layout, rates: Rates) -> Number:
    """Return the seconds per microbatch and rank without overlap: the host's time and the reductions of FP8 maxima."""
    if not rates.reduces_fp8_maxima:
        return rates.microbatch_s
    reduced_s = small_sum_s(rates, layouts.tp * layouts.cp * layouts.dp)
    return rates.microbatch_s + 2 * layouts.chunks * reduced_s


def step_s(model: ModelConfig, layouts: Layout, rates: Rates) -> Number:
    """Return the seconds of one training step in closed form."""
    parts = times(model, layouts, rates)
    m = layouts.microbatches
    pp = layouts.pp
    v = layouts.chunks
    per_layer = layer_s(parts.block, layouts, rates)
    both = sum(per_layer)
    ends = (sum(parts.embedding.both(m, rates)), sum(parts.head.both(m, rates)))
    most, last_layers = stage_layers(model, layouts)
    least_last = np.where(pp > 1, model.layers - most * (pp - 1), model.layers)
    last_layers = np.maximum(last_layers, np.minimum(least_last, most))
    message = 2 * p2p_s(model, layouts, rates)
    host = between_microbatches_s(layouts, rates)
    beside = (pp == 1) | (by_schedule(layouts, one_end) > 0)  # one pipeline rank holds both embedding and head
    paired = both - pair_s(parts.block, layouts, rates)
    first = most * paired + ends[0] + np.where(beside, ends[1], 0.0)
    last = last_layers * paired + np.where(beside, 0.0, ends[1])
    middle = np.where(pp > 2, most * paired, 0.0)
    slowest = np.maximum(np.maximum(first, np.where(pp > 1, last, 0.0)), middle) + host
    if rates.blocking_messages:
        busiest = slowest + message * v
    else:
        # Two neighbours of 1F1B wait for each other's messages, unless one of them has enough idle time. With chunks,
        # the compute of a complete chunk hides a message. In GPipe all messages of a phase have the same direction.
        hidden = (v > 1) | (layouts.schedule == "gpipe")
        lighter = np.where(pp > 2, middle, np.minimum(first, last)) + host
        busiest = np.maximum(slowest, np.where(hidden, 0.0, lighter + message))
        if rates.one_in_flight:
            # the first and the last stage exchange messages with one neighbour, not with two
            exposed_s = np.where(pp > 1, _exposed_messages(layouts, rates), 0.0) * message
            ends_exposed_s = np.where(split(layouts), exposed_s, exposed_s / 2)
            busiest = np.maximum(slowest + ends_exposed_s, np.where(pp > 1, lighter, 0.0) + exposed_s)
    ramp = model.layers * both + ends[0] + ends[1] + pp * host + (pp - 1) * message * v - busiest
    # Part of the bubble that deferred weight gradients fill, for F, I and W passes of equal time (Qi et al. 2023,
    # 2024). A single microbatch can defer only its own weight gradients.
    idle = by_schedule(layouts, idle_share, "chunks")
    deferred = 3 * (1 - idle) * (pp - 1) * most * parts.block.weights(m) * (1 + np.minimum((m - 1) / pp, 1.0)) / 2
    ramp = np.where(split(layouts), ramp - np.minimum(deferred, ramp), ramp * idle)
    pipeline = m * busiest + np.maximum(ramp, 0.0) * (pp > 1)
    routed = np.minimum(most, len(model.routed_layers))
    parameters = stage_numel(model, layouts.tp, most, True, pp == 1, routed=routed)
    whole = whole_update(model, layouts, rates, most, routed)
    end = tail(
        layouts=layouts,
        rates=rates,
        parameters=parameters,
        last_backward_s=most * per_layer[1],
        first_forward_s=most * per_layer[0],
        experts=expert_numel(model, layouts, most, routed=routed),
        whole=whole,
    )
    return pipeline + end.reduce_s + tied_sum_s(model, layouts, rates) + end.optimizer_s + end.gather_s
