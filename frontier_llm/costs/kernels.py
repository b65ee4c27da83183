"""Seconds of one kernel on one device: matrix products by shape, attention, memory-bound operations by bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from frontier_llm.costs.workload import Number
from frontier_llm.machine.rates import Rates

# Output tiles that vendor libraries choose from, and what each reaches of the best tile's rate: a smaller tile re-reads its
# operands more often (arithmetic intensity 2·m·n/(m+n) per element). The library takes whichever finishes first.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.82), (64, 64, 0.66))
ALIGNMENT = 8  # elements: 16 bytes, what matrix units and vector loads need


def gemm_s(M: Number, N: Number, K: Number, rates: Rates, batch: Number = 1, aligned: Number = True) -> Number:
    """Seconds of `batch` products (M,K)x(K,N) in 16 bit.

    Work is cut into output tiles; tiles run in waves of `compute_units`; a wave takes as long as its longest tile, so the
    last, partly filled wave costs a whole one (tile and wave quantisation). The inner loop reaches K/(K+k_half) of its rate
    (prologue, epilogue). Not faster than reading the operands and writing the result at memory speed.
    """
    M, N, K, batch = (np.asarray(value, dtype=float) for value in (M, N, K, batch))
    rate = rates.peak_flops * rates.gemm_efficiency / rates.compute_units  # of one compute unit
    inner = np.ceil(K / 32) * 32 + rates.gemm_k_half
    best = np.inf
    for rows, columns, relative in TILES:
        tiles = batch * np.ceil(M / rows) * np.ceil(N / columns)
        waves = np.ceil(tiles / rates.compute_units)
        # split-K and stream-K kernels fill up a ragged last wave when there are only a few waves: half of the loss stays
        waves = 0.5 * (waves + np.maximum(tiles / rates.compute_units, 1.0))
        best = np.minimum(best, waves * 2 * rows * columns * inner / (rate * relative))
    moved = 2 * batch * (M * K + K * N + M * N)
    slow = np.where(aligned, 1.0, rates.unaligned_penalty)
    seconds = np.maximum(best * slow, moved / (rates.hbm_bytes_s * rates.hbm_efficiency)) + rates.kernel_s
    return seconds * _measured_over_formula(M, N, K, rates) if rates.gemm_shapes else seconds


def _measured_over_formula(M: Number, N: Number, K: Number, rates: Rates) -> Number:
    """How the products that were measured nearest to this shape compare with the formula: 1 far from all of them.

    Weights fall with the squared distance in log2 of the three sizes; the formula itself counts as a sample two doublings away.
    """
    m, n, k, measured = np.array(rates.gemm_shapes).T
    ratios = np.log(measured / gemm_s(m, n, k, replace(rates, gemm_shapes=())))
    points = np.stack(np.broadcast_arrays(M, N, K), axis=-1)[..., None, :]
    distance = np.sum(np.log2(points / np.stack([m, n, k], axis=-1)) ** 2, axis=-1)
    weights = 1 / (distance + 1e-6)
    return np.exp((weights * ratios).sum(axis=-1) / (weights.sum(axis=-1) + 1 / 4))


def memory_s(moved_bytes: Number, kernels: Number, rates: Rates) -> Number:
    """Seconds of memory-bound kernels that together move `moved_bytes` between HBM and the device."""
    return moved_bytes / (rates.hbm_bytes_s * rates.hbm_efficiency) + kernels * rates.kernel_s


def flash_s(B: Number, a: Number, S: Number, D: Number, rates: Rates) -> tuple[Number, Number]:
    """(forward, backward) seconds of causal flash attention over `a` local heads.

    4·S²·D FLOPs per head forward, halved by causality; backward recomputes the scores: 2.5x. Efficiency falls for heads
    narrower than 128 (softmax work per FLOP doubles at 64) and for sequences of a few blocks.
    """
    flops = 2.0 * B * a * np.asarray(S, dtype=float) ** 2 * D
    width = np.asarray(D, dtype=float) / (np.asarray(D, dtype=float) + 32) * 1.25  # 1 at 128, 0.83 at 64
    length = np.asarray(S, dtype=float) / (np.asarray(S, dtype=float) + 512)
    blocks = B * a * np.ceil(np.asarray(S) / 128)
    filled = blocks / (np.ceil(blocks / rates.compute_units) * rates.compute_units)
    rate = rates.peak_flops * rates.flash_efficiency * np.minimum(width, 1.1) * length * filled**0.5
    return flops / rate + rates.kernel_s, 2.5 * flops / (rate * rates.flash_backward) + 2 * rates.kernel_s
