"""Bytes per rank and stage: weights, gradients, optimizer, activations in flight, logits, buffers, reserve.

Each line is returned by name, so that a plan can say what fills the device. All figures are for one pipeline rank, which holds
`chunks` virtual stages.
"""

from __future__ import annotations

import numpy as np

from frontier_llm.blueprint import StageSpec
from frontier_llm.costs.parameters import stage_columns, stage_parameters
from frontier_llm.costs.workload import FSDP, GPIPE, ZERO_BUBBLE, Number, Workload
from frontier_llm.machine.rates import Rates

Lines = dict[str, Number]

STATE_BYTES = 12  # fp32 master weight and two moments per parameter
BUCKET_BYTES = 2 * 160 * 2**20  # two gradient buckets in flight at 40 M parameters each


def layer_activation_bytes(w: Workload, rates: Rates, recompute: Number) -> Number:
    """What one layer keeps for backward of one microbatch.

    Kept whole (cut over tp with sequence parallelism): the inputs of both norms and their outputs, 4·S·B·H elements.
    Per tp part: q, k, v and the attention's output with its log-sum-exp; the MLP's pre-activation (twice if gated) and
    activation. Unfused attention adds scores and probabilities; dropout adds one byte per element masked. Compare
    Korthikanti et al. 2022, table 2: S·B·H·(10 + 24/t) with dropout's two masks. Full recompute keeps the layer's input only;
    selective drops the attention core's part.
    """
    T, H, tp, size = w.tokens * 1.0, w.H, np.asarray(w.tp, dtype=float), w.dtype_bytes
    cut = np.asarray(w.sequence_shards, dtype=float)
    heads, groups = np.asarray(w.A) * w.D / tp, np.asarray(w.G) * w.D / tp
    # what linear layers keep of their inputs for the weight gradient; FP8 layers keep one byte, and the attention's output twice
    kept = size if rates.linear_speedup == 1 else 1
    whole = (2 * size + 2 * kept) * T * H / cut + (2 * T * H / cut if rates.dropout else 0.0)
    flash = np.where(np.asarray(w.flash) < 0, rates.attention == "flash", np.asarray(w.flash) == 1)
    scores = np.asarray(w.B) * w.A / tp * np.asarray(w.S, dtype=float) ** 2 * (2 * size + (1 if rates.dropout else 0))
    qkv = T * (heads + 2 * groups) * size
    output = T * heads * (size if rates.linear_speedup == 1 else size + kept)
    core = np.where(flash, 4.0 * T * np.asarray(w.A) / tp, scores)
    mlp = T * np.asarray(w.F) / tp * (size * (1 + np.asarray(w.gated)) + kept)
    none = whole + qkv + output + core + mlp
    selective = none - np.where(flash, 4.0 * T * np.asarray(w.A) / tp, scores)
    share = np.asarray(w.recompute_share, dtype=float)
    full = T * H * size / np.where(np.asarray(w.checkpoints_cut) == 1, tp, cut) * share + none * (1 - share)
    mode = np.asarray(recompute)
    return np.where(mode == 0, none, np.where(mode == 1, selective, full))


def in_flight(w: Workload, stage: Number) -> Number:
    """Chunk activations that a pipeline rank holds at its worst moment.

    GPipe m; 1F1B min(m, pp - i); ZB-H1 min(m, pp); interleaved min(m·v, 2(pp - 1 - i) + (v - 1)·pp + 1).
    `schedule.in_flight` counts the same on the action lists; a test compares the two.
    """
    pp, m, v = (np.asarray(value, dtype=float) for value in (w.pp, w.m, w.chunks))
    one = np.minimum(m, pp - stage)
    one = np.where(np.asarray(w.schedule) == ZERO_BUBBLE, np.minimum(m, pp), one)
    one = np.where(np.asarray(w.schedule) == GPIPE, m, one)
    many = np.minimum(m * v, 2 * (pp - 1 - stage) + (v - 1) * pp + 1)
    return np.where(v > 1, many, one)


def waiting_for_weights(w: Workload, stage: Number) -> Number:
    """Microbatches of a split backward (ZB-H1) whose input gradient is done and whose weight gradients are not, at the worst moment."""
    pp, m = np.asarray(w.pp, dtype=float), np.asarray(w.m, dtype=float)
    return np.where(np.asarray(w.schedule) == ZERO_BUBBLE, np.minimum(m, pp) - np.minimum(m, pp - stage), 0.0)


def stage_memory(w: Workload, rates: Rates, layers: Number, stage: Number, embedding: Number, head: Number) -> Lines:
    """Lines of one pipeline rank that holds `layers` layers in all its chunks."""
    parameters = stage_parameters(w, layers, embedding, head)
    zero, dp = np.asarray(w.zero), np.asarray(w.dp, dtype=float)
    size, tokens = w.dtype_bytes, w.tokens * 1.0
    # gradients cut beside a pipeline are whole for one chunk, while its backwards add to them
    cut = np.where(np.asarray(w.gradients_cut) == 1, np.minimum(1 / dp + 1 / np.asarray(w.chunks, dtype=float), 1.0), 1.0)
    gradients = parameters * rates.gradient_bytes * np.where(zero >= 2, 1 / dp, cut)
    # fully sharded: a layer's gradients on their way out, this layer's and the next one's weights, and of its own weights only the fp32
    # master copy; otherwise the 16-bit ones stand beside it, gathered from forward to backward where they are gathered once
    gathered = stage_parameters(w, 1, False, False) * (rates.gradient_bytes + np.where(zero == FSDP, 2 * size, 0))
    weights = np.where(zero == FSDP, 0.0, parameters * size)
    state = STATE_BYTES if np.all(np.asarray(size) <= 2) else 2 * np.asarray(size)
    per_chunk = np.asarray(layers, dtype=float) / w.chunks
    held, waiting = in_flight(w, stage), waiting_for_weights(w, stage)
    mode = np.asarray(w.recompute)
    checkpointed = mode == 2
    # a product that waits for its W keeps its two factors, the other gradients instead of q, k, v and pre-activation: all but the attention core
    one, one_waiting = layer_activation_bytes(w, rates, mode), layer_activation_bytes(w, rates, np.ones_like(mode))
    kept = (one * (held - waiting) + one_waiting * waiting) * per_chunk
    working = np.where(checkpointed, layer_activation_bytes(w, rates, np.zeros_like(mode)), 0.0)
    head_bytes = size if rates.fused and rates.attention == "flash" else size + 4
    # the head's weight gradient waits with the gradient of its logits
    logits = np.where(head, tokens * np.asarray(w.V) / w.tp * (head_bytes + size * waiting), 0.0)
    boundary = np.where(np.asarray(w.pp) > 1, 4 * tokens * w.H * size / w.sequence_shards, 0.0)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": parameters * state / np.where(zero >= 1, dp, 1.0),
        "activations": kept * rates.fragmentation,
        "recompute working set": working * rates.fragmentation,
        "logits": np.maximum(logits - working * rates.fragmentation, 0.0),  # freed before the first layer is recomputed
        "pipeline buffers": boundary,
        "communication buffers": np.where(zero >= 2, gathered, np.minimum(np.where(dp > 1, BUCKET_BYTES, 0.0), parameters * size)),
        "reserve": rates.reserve_bytes + 0.0 * parameters,
    }


def memory_by_rank(w: Workload, rates: Rates, stages: tuple[StageSpec, ...]) -> tuple[dict[str, float], ...]:
    """Lines of every pipeline rank of one layout (plain numbers) with exactly these virtual stages."""
    ranks = np.arange(int(w.pp))
    layers, embeds, ends = (column.reshape(-1, len(ranks)).sum(axis=0) for column in stage_columns(stages))
    lines = stage_memory(w, rates, layers, ranks, embeds > 0, ends > 0)
    lines = {name: np.broadcast_to(values, ranks.shape) for name, values in lines.items()}
    return tuple({name: float(values[rank]) for name, values in lines.items()} for rank in ranks)


def total(lines: Lines) -> Number:
    """Sum of the lines."""
    return sum(lines.values())


def peak_memory(w: Workload, rates: Rates) -> Number:
    """The fullest rank of the layout with evenly spread layers: the first stage (embedding, most in flight) or the last (head, logits)."""
    pp = np.asarray(w.pp, dtype=float)
    alone = pp == 1
    first = total(stage_memory(w, rates, w.stage_layers, np.zeros_like(pp), True, alone))
    last_layers = np.where(np.asarray(w.layers) % pp == 0, w.stage_layers, np.floor(np.asarray(w.layers) / pp))
    last = total(stage_memory(w, rates, last_layers, pp - 1, alone, True))
    return np.maximum(first, last)
