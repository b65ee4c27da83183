"""Seconds of one kernel on one device: matrix products and attention from shapes, memory-bound kernels from bytes."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, exp, log, log2, sqrt
from statistics import NormalDist
from typing import Any

from frontier_llm.blueprint.items import FlashCore, Product
from frontier_llm.machine.rates import Rates

# Output tiles (rows, columns) from which vendor libraries choose, and their rates relative to the best tile. A smaller
# tile re-reads its operands more often (arithmetic intensity 2·m·n/(m+n) per element). The library is assumed to take
# the fastest tile.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.82), (64, 64, 0.66))


def product_s(product: Product, rates: Rates) -> float:
    """Return the seconds of a batch of matrix products in 16 bit, or in 8 bit if product and software allow it.

    The output is cut into tiles, which run in waves of `compute_units`. A wave takes as long as its longest tile. The
    last, partly filled wave therefore costs as much as a full one (tile and wave quantisation). Because of prologue and
    epilogue, a kernel with inner dimension k reaches k/(k+k_half) of its rate. A product takes at least the time for
    reading its operands and writing its result at memory bandwidth. If products were measured on this machine, the
    formula is scaled by the measurements of the nearest shapes. The grouped products of experts have another kernel,
    which reaches `grouped_share` of this rate.
    """
    m = product.m
    n = product.n
    k = product.k
    batch = product.batch
    units = rates.compute_units
    # FLOP/s of one compute unit
    rate = rates.peak_flops * (rates.linear_speedup if product.fp8 else 1.0) * rates.gemm_efficiency / units
    inner = ceil(k / 32) * 32 + rates.gemm_k_half
    best = float("inf")
    for rows, columns, relative in TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        # split-K and stream-K kernels fill a partly filled last wave, so only half of its loss is counted
        waves = 0.5 * (ceil(tiles / units) + max(tiles / units, 1.0))
        best = min(best, waves * 2 * rows * columns * inner / (rate * relative))
    slow = 1.0 if product.aligned else rates.unaligned_penalty
    seconds = max(best * slow, product.moved_bytes / (rates.hbm_bytes_s * rates.hbm_efficiency)) + rates.kernel_s
    if product.grouped:
        seconds /= rates.grouped_share
    if rates.gemm_shapes:
        return seconds * _measured_over_formula(product, rates)
    return seconds


def _measured_over_formula(product: Product, rates: Rates) -> float:
    """Return the factor by which measured products of similar shapes take longer than the formula of `product_s`.

    The factor is a weighted geometric mean over all measured products. The weight falls with the squared distance of
    the shapes in log2 of M, N and K. The formula itself is one sample with factor 1, at a distance of two doublings.
    Far from all measurements the result therefore approaches 1.
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
    """Return the time of a matrix product on the slowest of `devices` devices, relative to the slowest device of one
    node.

    Devices of one type differ in clock and power, and in every step all devices wait for the slowest. With more
    devices, the slowest device is slower. The reference is one node because efficiencies are measured on one node.
    """
    if not rates.speed_variation or devices <= rates.node_devices:
        return 1.0
    return 1 + rates.speed_variation * (_largest(devices) - _largest(rates.node_devices))


def _largest(samples: int) -> float:
    """Return the expected maximum of `samples` normally distributed numbers, in standard deviations (Blom 1958)."""
    return NormalDist().inv_cdf((samples - 0.375) / (samples + 0.25))


def memory_s(moved_bytes: Any, kernels: int, rates: Rates) -> Any:
    """Return the seconds of memory-bound kernels that together read and write `moved_bytes` of HBM."""
    return moved_bytes / (rates.hbm_bytes_s * rates.hbm_efficiency) + kernels * rates.kernel_s


def flash_s(core: FlashCore, rates: Rates) -> float:
    """Return the seconds of causal flash attention, forward or backward.

    Forward has 4·S²·D FLOPs per head, of which causality saves half. Backward recomputes the scores and has 2.5 times
    as many FLOPs. The efficiency is lower for head dimensions below 128 (at 64, softmax work per FLOP doubles). It is
    also lower for sequences of only a few blocks of 128 queries.
    """
    # the factor for the head dimension, `width`, is 1 at 128 and 0.83 at 64
    keys = core.keys
    width = core.head_dim / (core.head_dim + 32) * 1.25
    forward_flops = 2.0 * core.batch * core.heads * core.queries * keys * core.head_dim
    blocks = core.batch * core.heads * ceil(core.queries / 128)
    filled = blocks / (ceil(blocks / rates.compute_units) * rates.compute_units)
    rate = rates.peak_flops * rates.flash_efficiency * min(width, 1.1) * keys / (keys + 512) * sqrt(filled)
    if core.backward:
        return 2.5 * forward_flops / (rate * rates.flash_backward) + 2 * rates.kernel_s
    return forward_flops / rate + rates.kernel_s
