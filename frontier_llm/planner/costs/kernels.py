"""Seconds of one kernel on one device: matrix products by shape, attention, memory-bound operations by bytes."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, exp, log, log2, sqrt
from statistics import NormalDist
from typing import Any

from frontier_llm.blueprint.items import FlashCore, Product
from frontier_llm.machine.rates import Rates

# Output tiles that vendor libraries choose from, and what each reaches of the best tile's rate: a smaller tile re-reads
# its
# operands more often (arithmetic intensity 2·m·n/(m+n) per element). The library takes whichever finishes first.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.82), (64, 64, 0.66))


def product_s(product: Product, rates: Rates) -> float:
    """Seconds of matrix products in 16 bit, or in 8 where the software has that for them.

    Work is cut into output tiles; tiles run in waves of `compute_units`; a wave takes as long as its longest tile, so
    the last, partly filled wave costs a whole one (tile and wave quantisation). The inner loop reaches k/(k+k_half) of
    its rate (prologue, epilogue). Not faster than reading the operands and writing the result at memory speed.
    """
    m = product.m
    n = product.n
    k = product.k
    batch = product.batch
    units = rates.compute_units
    # of one compute unit
    rate = rates.peak_flops * (rates.linear_speedup if product.fp8 else 1.0) * rates.gemm_efficiency / units
    inner = ceil(k / 32) * 32 + rates.gemm_k_half
    best = float("inf")
    for rows, columns, relative in TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        # split-K and stream-K kernels fill up a ragged last wave when there are only a few waves: half of the loss
        # stays
        waves = 0.5 * (ceil(tiles / units) + max(tiles / units, 1.0))
        best = min(best, waves * 2 * rows * columns * inner / (rate * relative))
    slow = 1.0 if product.aligned else rates.unaligned_penalty
    seconds = max(best * slow, product.moved_bytes / (rates.hbm_bytes_s * rates.hbm_efficiency)) + rates.kernel_s
    if rates.gemm_shapes:
        return seconds * _measured_over_formula(product, rates)
    return seconds


def _measured_over_formula(product: Product, rates: Rates) -> float:
    """How the products that were measured nearest to this shape compare with the formula: 1 far from all of them.

    Weights fall with the squared distance in log2 of the three sizes; the formula itself counts as a sample two
    doublings away.
    """
    formula = replace(rates, gemm_shapes=())
    total = 0.0
    weights = 1 / 4
    for m, n, k, measured_s in rates.gemm_shapes:
        distance = log2(product.m / m) ** 2 + log2(product.n / n) ** 2 + log2(product.k / k) ** 2
        weight = 1 / (distance + 1e-6)
        total += weight * log(measured_s / product_s(Product(int(m), int(n), int(k), fp8=product.fp8), formula))
        weights += weight
    return exp(total / weights)


def pace(devices: int, rates: Rates) -> float:
    """Time of a product on the slowest of `devices` over that on the slowest of one node, where efficiencies are
    measured.

    Like devices differ in clock and power, all wait for the slowest in every step, and of more devices the slowest is
    slower.
    """
    if not rates.speed_variation or devices <= rates.node_devices:
        return 1.0
    return 1 + rates.speed_variation * (_largest(devices) - _largest(rates.node_devices))


def _largest(samples: int) -> float:
    """Expected largest of so many normally distributed numbers, in standard deviations (Blom 1958)."""
    return NormalDist().inv_cdf((samples - 0.375) / (samples + 0.25))


def memory_s(moved_bytes: Any, kernels: int, rates: Rates) -> Any:
    """Seconds of memory-bound kernels that together move `moved_bytes` (a number or an array) between HBM and the
    device.
    """
    return moved_bytes / (rates.hbm_bytes_s * rates.hbm_efficiency) + kernels * rates.kernel_s


def flash_s(core: FlashCore, rates: Rates) -> float:
    """Seconds of causal flash attention, forward or backward.

    4·S²·D FLOPs per head forward, halved by causality; backward recomputes the scores: 2.5x. Efficiency falls for heads
    narrower than 128 (softmax work per FLOP doubles at 64) and for sequences of a few blocks.
    """
    # 1 at 128, 0.83 at 64
    keys = core.keys
    width = core.head_dim / (core.head_dim + 32) * 1.25
    forward_flops = 2.0 * core.batch * core.heads * core.queries * keys * core.head_dim
    blocks = core.batch * core.heads * ceil(core.queries / 128)
    filled = blocks / (ceil(blocks / rates.compute_units) * rates.compute_units)
    rate = rates.peak_flops * rates.flash_efficiency * min(width, 1.1) * keys / (keys + 512) * sqrt(filled)
    if core.backward:
        return 2.5 * forward_flops / (rate * rates.flash_backward) + 2 * rates.kernel_s
    return forward_flops / rate + rates.kernel_s
