"""Seconds of a step in closed form, for one layout or thousands at once; the simulator refines the finalists.

The closed form of a pipeline: with stage i taking t_i = f_i + b_i per microbatch and d for a message,

    step = m · T + (sum_i (t_i + 2 d) - T) / v + …,   T = max_i t_i + 2 d       (1F1B: v = 1; interleaved: the ramp shrinks by v)

which is exact for equal stages (bubble (p-1)/(v·m)) and within a few percent for unequal ones (tests compare it with the
simulation). Where messages flow beside the compute, T is the slowest stage, or the next slower one plus its messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frontier_llm.costs.collectives import message_s
from frontier_llm.costs.hierarchical import collective_s
from frontier_llm.costs.kernels import memory_s
from frontier_llm.costs.layer import embedding_terms, head_terms, layer_terms, totals, waiting_s, weight_gradient_s
from frontier_llm.costs.parameters import stage_parameters
from frontier_llm.costs.workload import GPIPE, ZERO_BUBBLE, Number, Workload
from frontier_llm.machine.rates import Rates


@dataclass(frozen=True)
class Placement:
    """Where the ranks of each axis sit: how many share a node, and who shares the NICs."""

    tp_per_node: Number
    dp_per_node: Number
    dp_sharing: Number  # dp groups of one node that reduce at the same time
    pp_inside: Number  # 1 = pipeline neighbours sit in the same node
    pp_sharing: Number  # devices of a node that send at the same time


def placement(w: Workload, rates: Rates) -> Placement:
    """tp innermost; then dp (tp-dp-pp) or pp (tp-pp-dp). A node is filled in that order."""
    node = rates.node_devices
    tp, pp, dp = (np.asarray(value, dtype=float) for value in (w.tp, w.pp, w.dp))
    tp_inside = np.minimum(tp, node)
    room = np.maximum(node / tp_inside, 1.0)
    stages_inside = np.where(
        np.asarray(w.dp_outer) == 1, np.minimum(pp, room), np.where(tp * dp < node, np.minimum(pp, node / (tp * dp)), 1.0)
    )
    replicas = np.where(np.asarray(w.dp_outer) == 1, np.maximum(np.minimum(dp, room / stages_inside), 1.0), np.minimum(dp, room))
    per_node = np.minimum(node, tp * pp * dp)
    return Placement(
        tp_per_node=tp_inside,
        dp_per_node=replicas,
        dp_sharing=np.maximum(per_node / replicas, 1.0),
        pp_inside=stages_inside > 1,
        pp_sharing=per_node,
    )


def p2p_bytes(w: Workload, rates: Rates) -> Number:
    """One activation between stages as each tp rank sends it: S·B·H, cut over tp with sequence parallelism or scatter-gather."""
    size = w.tokens * w.H * w.dtype_bytes
    return np.where((np.asarray(w.sp) == 1) | rates.p2p_split, size / np.asarray(w.tp, dtype=float), size)


def p2p_s(w: Workload, rates: Rates) -> Number:
    """Seconds of one message between pipeline neighbours (0 without a pipeline)."""
    place = placement(w, rates)
    return np.where(np.asarray(w.pp) > 1, message_s(rates, p2p_bytes(w, rates), place.pp_inside, place.pp_sharing), 0.0)


@dataclass(frozen=True)
class StepTail:
    """What follows the pipeline: gradient sum, optimizer, weight gather; exposed seconds."""

    reduce_s: Number
    optimizer_s: Number
    gather_s: Number


def gradient_reduction_s(w: Workload, rates: Rates, parameters: Number) -> tuple[Number, Number]:
    """(reduce, gather) seconds of one stage's gradients over dp, bucket by bucket: all-reduce, or reduce-scatter and all-gather with ZeRO-1."""
    place = placement(w, rates)
    element_bytes = np.where(np.asarray(w.gradient_bytes) > 0, w.gradient_bytes, rates.gradient_bytes)
    buckets = np.maximum(parameters / rates.bucket_parameters, 1.0) if rates.bucket_parameters else 1.0

    def seconds(operation: str, size_bytes: Number) -> Number:
        return buckets * collective_s(rates, w.dp, place.dp_per_node, place.dp_sharing, size_bytes / buckets, operation)

    summed = seconds("all_reduce", parameters * element_bytes)
    scattered = seconds("reduce_scatter", parameters * element_bytes)
    gathered = seconds("all_gather", parameters * np.asarray(w.dtype_bytes))
    sharded = np.asarray(w.zero) >= 1
    return np.where(sharded, scattered, summed), np.where(sharded, gathered, 0.0)


def overlap_windows(w: Workload) -> Number:
    """Backwards of a whole stage that run after the first gradients of the step are complete, in units of one microbatch's.

    Without chunks the last microbatch's backward; interleaved, the last round: pp microbatches of every chunk but one.
    """
    pp, v = np.asarray(w.pp, dtype=float), np.asarray(w.chunks, dtype=float)
    return np.minimum((pp * (v - 1) + 1) / v, np.maximum(np.asarray(w.m, dtype=float), 1.0))


def tail(w: Workload, rates: Rates, parameters: Number, last_backward_s: Number, first_forward_s: Number) -> StepTail:
    """The step's end for a stage of `parameters` (this rank's part); the seconds are one microbatch's over the whole stage."""
    reduce_s, gather_s = gradient_reduction_s(w, rates, parameters)
    windows = overlap_windows(w)
    owned = parameters / np.where(np.asarray(w.zero) >= 1, np.asarray(w.dp, dtype=float), 1.0)
    sharded = np.asarray(w.zero) >= 2  # gradients are cut like the state, and what moves has moved layer by layer
    held = np.where(sharded, owned, parameters)
    update_s = memory_s(owned * rates.optimizer_bytes, 4, rates) + memory_s(held * 2.0 * rates.gradient_bytes, 2, rates)
    return StepTail(
        reduce_s=np.where(sharded, 0.0, exposed_s(reduce_s, windows * last_backward_s, rates.dp_overlap)),
        optimizer_s=update_s + rates.step_s,
        gather_s=np.where(sharded, 0.0, exposed_s(gather_s, windows * first_forward_s, rates.gather_overlap)),
    )


def fsdp_layer_s(w: Workload, rates: Rates, parameters: Number) -> tuple[Number, Number]:
    """(forward, backward) seconds of a layer's all-gathers and reduce-scatter when weights are sharded too (zero 2, 3)."""
    place = placement(w, rates)
    args = (w.dp, place.dp_per_node, place.dp_sharing)
    gather = collective_s(rates, *args, parameters * np.asarray(w.dtype_bytes), "all_gather") * rates.sharded_slowdown
    scatter = collective_s(rates, *args, parameters * rates.gradient_bytes, "reduce_scatter") * rates.sharded_slowdown
    again = np.where(np.asarray(w.zero) == 3, gather, 0.0)  # SHARD_GRAD_OP keeps the weights until backward
    return gather, again + scatter


def layer_s(w: Workload, rates: Rates) -> tuple[Number, Number]:
    """(forward, backward) seconds of a layer; where weights are sharded, with what shows of gathering and scattering them beside it."""
    forward, backward = totals(layer_terms(w, rates))
    sharded = np.asarray(w.zero) >= 2
    if not np.any(sharded):
        return forward, backward
    gather, scatter = fsdp_layer_s(w, rates, stage_parameters(w, 1, False, False))
    overlap = 0.0 if rates.host_executes else rates.dp_overlap  # what moves the bytes is what computes
    shown = tuple(
        exposed_s(moved, compute, overlap) + waiting_s(meetings, compute, rates)
        for moved, compute, meetings in ((gather, forward, 1), (scatter, backward, 2))
    )
    return forward + np.where(sharded, shown[0], 0.0), backward + np.where(sharded, shown[1], 0.0)


def exposed_s(communication_s: Number, compute_s: Number, overlap: float) -> Number:
    """What communication adds to the compute beside it: what does not fit under it, and at least the share that never overlaps."""
    return np.maximum(communication_s * (1 - overlap), communication_s - compute_s)


def step_s(w: Workload, rates: Rates) -> Number:
    """Seconds of one training step in closed form."""
    per_layer = layer_s(w, rates)
    embedding, head = totals(embedding_terms(w, rates)), totals(head_terms(w, rates))
    both = per_layer[0] + per_layer[1]
    ends = embedding[0] + embedding[1], head[0] + head[1]
    pp, v, m = (np.asarray(value, dtype=float) for value in (w.pp, w.chunks, w.m))
    layers = np.asarray(w.layers, dtype=float)
    most = w.stage_layers
    least_last = np.where(pp > 1, layers - most * (pp - 1), layers)
    last_layers = np.maximum(np.where(layers % pp == 0, most, np.floor(layers / pp)), np.minimum(least_last, most))
    message = 2 * p2p_s(w, rates)
    host = rates.microbatch_s
    first = most * both + ends[0] + np.where(pp == 1, ends[1], 0.0)
    last = last_layers * both + ends[1]
    middle = np.where(pp > 2, most * both, 0.0)
    slowest = np.maximum(np.maximum(first, np.where(pp > 1, last, 0.0)), middle) + host
    if rates.blocking_messages:
        busiest = slowest + message * v
    else:
        # two neighbours of 1F1B wait for each other's messages unless one of them has that much less to do; with chunks a
        # message has a whole chunk's compute to hide under, and GPipe's messages of one phase follow each other
        hidden = (v > 1) | (np.asarray(w.schedule) == GPIPE)
        lighter = np.where(pp > 2, middle, np.minimum(first, last)) + host
        busiest = np.maximum(slowest, np.where(hidden, 0.0, lighter + message))
    ramp = (layers * both + ends[0] + ends[1] + pp * host + (pp - 1) * message * v - busiest) / v
    # ZB-H1 (Qi et al. 2023): a stage's bubble shrinks by two weight gradients; a single microbatch can defer only its own
    split = np.asarray(w.schedule) == ZERO_BUBBLE
    deferred = (pp - 1) * most * weight_gradient_s(w, rates) * (1 + np.minimum((m - 1) / pp, 1.0))
    ramp = ramp - np.where(split, np.minimum(deferred, ramp), 0.0)
    pipeline = m * busiest + np.maximum(ramp, 0.0) * (pp > 1)
    parameters = stage_parameters(w, most, True, pp == 1)
    end = tail(w, rates, parameters, most * per_layer[1], most * per_layer[0])
    return pipeline + end.reduce_s + end.optimizer_s + end.gather_s
