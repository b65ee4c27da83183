"""Seconds of one transformer layer, and of the embedding and the head, on one rank for one microbatch.

Each returns named terms {name: (forward_s, backward_s)}, so that `plan --explain` prints the very numbers that were added.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from frontier_llm.costs.collectives import node_s
from frontier_llm.costs.hierarchical import collective_s
from frontier_llm.costs.kernels import ALIGNMENT, flash_s, gemm_s, memory_s
from frontier_llm.costs.workload import ZERO_BUBBLE, Number, Workload
from frontier_llm.machine.rates import Rates

Terms = dict[str, tuple[Number, Number]]

# operations that the host dispatches per layer in eager PyTorch (kernels, views, autograd nodes, collectives); backward issues two
# products per weight and an accumulation
FORWARD_OPS, BACKWARD_OPS = 24, 40


def accumulate_bytes(w: Workload, rates: Rates) -> Number:
    """Bytes per parameter and microbatch to add a weight gradient to its buffer; the first microbatch only writes.

    An fp32 buffer where the stack's own is 16 bit costs 6 bytes more (4 read, 4 written instead of 2, and the 16-bit product).
    """
    more = np.where((np.asarray(w.gradient_bytes) == 4) & (rates.gradient_bytes == 2), 6.0, 0.0)
    return (rates.accumulate_bytes + more) * (1 - 1 / np.maximum(np.asarray(w.m, dtype=float), 1))


def linear(tokens: Number, inputs: Number, outputs: Number, rates: Rates, accumulate: Number) -> tuple[Number, Number]:
    """(forward, backward) seconds of a linear layer: input and weight gradient, and adding the latter to the buffer."""
    forward = gemm_s(tokens, outputs, inputs, rates)
    backward = gemm_s(tokens, inputs, outputs, rates) + gemm_s(outputs, inputs, tokens, rates)
    return forward, backward + memory_s(accumulate * inputs * outputs, 0, rates)


def in_layers(rates: Rates) -> Rates:
    """The rates at which a layer's own products run: FP8 stacks multiply there and leave attention and the head in 16 bit."""
    return replace(rates, peak_flops=rates.peak_flops * rates.linear_speedup)


def tp_collective_s(w: Workload, rates: Rates) -> Number:
    """One all-reduce of the activations (S·B·H) over tp, or, with sequence parallelism, the pair that replaces it.

    A ring all-reduce is a reduce-scatter and an all-gather, so both cost the same bytes. tp beyond the node pays the network.
    """
    size = w.tokens * w.H * w.dtype_bytes
    tp = np.asarray(w.tp, dtype=float)
    per_node = np.minimum(tp, rates.node_devices)
    whole, gather, scatter = (node_s(rates, per_node, size, name) for name in ("all_reduce", "all_gather", "reduce_scatter"))
    inside = np.where(np.asarray(w.sp) == 1, gather + scatter, whole)
    across = collective_s(rates, tp, per_node, rates.node_devices / per_node, size, "all_reduce")
    return np.where(tp <= rates.node_devices, inside, across) * (1 - rates.tp_overlap)


def attention_core(w: Workload, rates: Rates) -> tuple[Number, Number]:
    """(forward, backward) seconds of scores, softmax, dropout and weighted sum for this rank's heads."""
    a = np.asarray(w.A) / w.tp
    S = np.asarray(w.S, dtype=float)
    flash = flash_s(w.B, a, S, w.D, rates)
    batch = w.B * a
    aligned = np.asarray(w.D) % ALIGNMENT == 0
    scores = gemm_s(S, S, w.D, rates, batch, aligned)
    values = gemm_s(S, w.D, S, rates, batch, aligned)
    square = batch * S * S * 2  # bytes of the score matrix
    # passes over the scores in 16 bit; softmax by separate kernels goes through fp32: convert 3, scale 4, mask 4.5, softmax 4, convert 3
    passes = (2.0 if rates.fused_softmax else 18.5) + (2.5 if rates.dropout else 0.0)
    forward = scores + values + memory_s(passes * square, 2, rates)
    backward = 2 * (scores + values) + memory_s((passes + 1.0) * square, 2, rates)
    use_flash = np.where(np.asarray(w.flash) < 0, rates.attention == "flash", np.asarray(w.flash) == 1)
    return np.where(use_flash, flash[0], forward), np.where(use_flash, flash[1], backward)


def elementwise(w: Workload, rates: Rates) -> tuple[Number, Number]:
    """(forward, backward) seconds of norms, biases, activation, rotary, dropout and residual additions.

    Bytes in passes over S·B·H: per norm 2, per residual 3 (+1.5 with dropout and its mask); these are cut over the sequence
    only with sequence parallelism. Per tp part: the qkv split and merge, 4 passes over F of the activation.
    """
    token_bytes = w.tokens * 2.0
    block = token_bytes * w.H / w.sequence_shards
    residual = 3.0 + (1.5 if rates.dropout else 0.0)
    whole = (2 * 2.0 + 2 * residual) * block * (1.0 if rates.fused else 1.8)
    heads = (np.asarray(w.A) + 2 * np.asarray(w.G)) * w.D / w.tp
    inner = token_bytes * heads * (2.0 + 2.0 * np.asarray(w.rope)) + token_bytes * w.F / w.tp * (2 + np.asarray(w.gated)) * (
        1.0 if rates.fused else 2.5
    )
    kernels = 6 if rates.fused else 16
    return memory_s(whole + inner, kernels, rates), memory_s(1.6 * (whole + inner), 2 * kernels, rates)


def waiting_s(meetings: Number, compute_s: Number, rates: Rates) -> Number:
    """What ranks wait for each other at `meetings` that cut `compute_s` into pieces."""
    return meetings * rates.meeting_s + compute_s * rates.spread


def layer_terms(w: Workload, rates: Rates) -> Terms:
    """One layer; the recomputed forward is counted in backward."""
    T, H, tp = w.tokens, w.H, w.tp
    accumulate = accumulate_bytes(w, rates)
    fast = in_layers(rates)
    qkv = linear(T, H, (np.asarray(w.A) + 2 * np.asarray(w.G)) * w.D / tp, fast, accumulate)
    out = linear(T, np.asarray(w.A) * w.D / tp, H, fast, accumulate)
    up = linear(T, H, (1 + np.asarray(w.gated)) * w.F / tp, fast, accumulate)
    down = linear(T, np.asarray(w.F) / tp, H, fast, accumulate)
    tp_s = 2 * tp_collective_s(w, rates)
    # with sequence parallelism the backward of a column-parallel product gathers its input again, under the input gradient
    # where anything runs beside anything: half of it shows; a weight gradient that waits for its W gathers its own gradient again
    split = np.asarray(w.schedule) == ZERO_BUBBLE
    gather = node_s(rates, np.minimum(tp, rates.node_devices), T * H * w.dtype_bytes, "all_gather")
    regather = np.where(np.asarray(w.sp) == 1, np.where(split, 4, 2) * gather, 0.0)
    terms: Terms = {
        "matrix products": (
            qkv[0] + out[0] + up[0] + down[0],
            qkv[1] + out[1] + up[1] + down[1],
        ),
        "attention": attention_core(w, rates),
        "norms, activation, residual": elementwise(w, rates),
        "tp communication": (tp_s, tp_s + regather * (1 - rates.tp_overlap) * (1.0 if rates.host_executes else 0.5)),
    }
    if rates.meeting_s or rates.spread:
        # sums, or where the sequence is parallel twice as many gathers and scatters, and backward gathers its inputs again
        meetings = np.where(np.asarray(w.sp) == 1, 4, 2), np.where(np.asarray(w.sp) == 1, np.where(split, 8, 6), 2)
        compute = [sum(term[side] for name, term in terms.items() if name != "tp communication") for side in (0, 1)]
        waits = [np.where(np.asarray(tp) > 1, waiting_s(number, one, rates), 0.0) for number, one in zip(meetings, compute, strict=True)]
        terms["waiting for tp ranks"] = waits[0], waits[1]
    full, selective = np.asarray(w.recompute) == 2, np.asarray(w.recompute) == 1
    again = {key: np.where(full, value[0], 0.0) for key, value in terms.items()}
    again["attention"] = np.where(full | selective, terms["attention"][0], 0.0)
    terms["recompute"] = (0.0 * np.asarray(tp_s), sum(again.values()) * np.where(full, w.recompute_share, 1.0))
    # the host dispatches ahead of the device; where it cannot keep up, the layer takes the host's time. A CPU does one after the other
    forward, backward = (sum(term[side] for name, term in terms.items() if name != "tp communication") for side in (0, 1))
    backward = backward - np.where(full, tp_s * w.recompute_share, 0.0)
    host_forward = FORWARD_OPS * rates.launch_s
    host_backward = (BACKWARD_OPS + FORWARD_OPS * full + 6 * selective) * rates.launch_s
    if rates.host_executes:
        forward, backward = 0.0, 0.0
    terms["launch-bound"] = (np.maximum(host_forward - forward, 0.0), np.maximum(host_backward - backward, 0.0))
    return terms


def weight_gradient_s(w: Workload, rates: Rates) -> Number:
    """The part of a layer's backward that makes weight gradients: what a zero-bubble schedule may run later."""
    T, H, tp, more = w.tokens, np.asarray(w.H, dtype=float), w.tp, accumulate_bytes(w, rates)
    shapes = (
        (H, (np.asarray(w.A) + 2 * np.asarray(w.G)) * w.D / tp),
        (np.asarray(w.A) * w.D / tp, H),
        (H, (1 + np.asarray(w.gated)) * w.F / tp),
        (np.asarray(w.F) / tp, H),
    )
    fast = in_layers(rates)
    return sum(gemm_s(outputs, inputs, T, fast) + memory_s(more * inputs * outputs, 0, rates) for inputs, outputs in shapes)


def embedding_terms(w: Workload, rates: Rates) -> Terms:
    """The vocabulary-parallel embedding: gather rows, sum over tp; backward scatters into the gradient."""
    size = w.tokens * w.H * w.dtype_bytes
    sum_s = tp_collective_s(w, rates)
    return {"embedding": (memory_s(3 * size, 4, rates) + sum_s, memory_s(4 * size, 4, rates))}


def head_terms(w: Workload, rates: Rates) -> Terms:
    """Final norm, output head and cross-entropy over 16-bit logits.

    Fused: read once forward, read and overwritten backward. By separate kernels, as Megatron has them (bytes per logit): to fp32 6,
    maximum 4, subtract 8, exponential 8, sum 4, divide 8; backward multiply 8, to 16 bit 6.
    """
    T, v = w.tokens, np.asarray(w.V) / w.tp
    accumulate = accumulate_bytes(w, rates)
    product = linear(T, w.H, v, rates, accumulate)
    logits = T * v
    forward_bytes, backward_bytes = (2.0, 4.0) if rates.fused_cross_entropy else (38.0, 14.0)
    both_s = tp_collective_s(w, rates)  # with sequence parallelism the gather and the scatter; the head has one of them each way
    sum_s = np.where(np.asarray(w.sp) == 1, both_s / 2, both_s)
    stats_s = node_s(rates, np.minimum(w.tp, rates.node_devices), 12.0 * T * np.asarray(w.tp), "all_gather")
    return {
        "head": (product[0] + np.where(np.asarray(w.sp) == 1, sum_s, 0.0), product[1] + sum_s),
        "cross-entropy": (memory_s(forward_bytes * logits, 6, rates) + stats_s, memory_s(backward_bytes * logits, 3, rates)),
    }


def totals(terms: Terms) -> tuple[Number, Number]:
    """(forward, backward) sums."""
    return sum(term[0] for term in terms.values()), sum(term[1] for term in terms.values())
