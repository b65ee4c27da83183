"""Micro-benchmarks → a machine file: each constant from the sample that shows it, with the sample as its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from frontier_llm.config import RunConfig
from frontier_llm.costs.kernels import flash_s, gemm_s
from frontier_llm.costs.layer import elementwise
from frontier_llm.costs.time import step_s
from frontier_llm.costs.workload import Workload, from_config
from frontier_llm.machine import Rates, load_machine, rates
from frontier_llm.planner.fit import minimise, soften

STACK = "frontier-llm"


class Measured(Protocol):
    """What `train.calibrate.Samples` carries."""

    ranks: int
    device: str
    dtype: str
    memory_bytes: float
    gemm: list[tuple[int, int, int, float]]
    attention: list[tuple[int, int, int, int, float, float]]
    elementwise_s: float
    copy: tuple[float, float]
    dispatch_s: float
    adamw: tuple[float, float]
    all_reduce: list[tuple[int, float]]
    steps: list[tuple[int, float]]


def calibrated_rates(samples: Measured, config: RunConfig, start: Rates) -> Rates:
    """`start` with every constant that the samples show.

    Products: the peak is the best rate seen, then efficiency and k-half by least squares over all shapes. Attention, elementwise,
    optimizer: the efficiency that makes the formula give the measured time. All-reduce: bandwidth from the largest message,
    latency from the smallest. What whole steps of 1 and 4 microbatches take beyond the prediction is host time per microbatch and
    per step.
    """
    M, N, K, seconds = (np.array(column, dtype=float) for column in zip(*samples.gemm, strict=True))
    found = replace(
        start,
        peak_flops=float(np.max(2 * M * N * K / seconds)),
        hbm_bytes_s=samples.copy[0] / samples.copy[1],
        memory_bytes=samples.memory_bytes,
        hbm_efficiency=1.0,
        kernel_s=samples.dispatch_s,
        launch_s=0.0 if samples.device == "cpu" else start.launch_s,
        node_devices=samples.ranks,
        microbatch_s=0.0,
        step_s=0.0,
    )
    found = _fit_products(found, M, N, K, seconds)
    found = _fit_attention(found, samples)
    workload = _workload(config, samples.ranks, 1)
    found = _fit_elementwise(found, samples, workload)
    if samples.all_reduce:
        found = _fit_all_reduce(found, samples)
    return _fit_host(found, samples, config)


def _fit_products(found: Rates, M: np.ndarray, N: np.ndarray, K: np.ndarray, seconds: np.ndarray) -> Rates:
    def changed(x: np.ndarray) -> Rates:
        return replace(found, gemm_efficiency=float(min(np.exp(x[0]), 1.0)), gemm_k_half=float(64 * np.exp(x[1])))

    x = minimise(lambda x: np.concatenate([soften(np.log(gemm_s(M, N, K, changed(x)) / seconds)), 0.05 * x]), 2, 60)
    return changed(x)


def _fit_attention(found: Rates, samples: Measured) -> Rates:
    forwards, backwards = [], []
    for B, heads, S, D, forward_s, backward_s in samples.attention:
        forward, backward = flash_s(B, heads, S, D, replace(found, flash_efficiency=1.0, flash_backward=1.0, kernel_s=0.0))
        forwards.append(float(forward) / max(forward_s - found.kernel_s, 1e-9))
        backwards.append(float(backward) / max(backward_s - 2 * found.kernel_s, 1e-9))
    efficiency = float(np.median(forwards))
    return replace(found, flash_efficiency=efficiency, flash_backward=float(np.median(backwards)) / efficiency)


def _fit_elementwise(found: Rates, samples: Measured, workload: Workload) -> Rates:
    bare = float(elementwise(workload, replace(found, kernel_s=0.0))[0])
    measured = max(samples.elementwise_s - 6 * found.kernel_s, 1e-9)
    return replace(found, hbm_efficiency=float(min(bare / measured, 1.0)))


def _fit_all_reduce(found: Rates, samples: Measured) -> Rates:
    small, large = samples.all_reduce[0], samples.all_reduce[-1]
    n = samples.ranks
    latency = small[1]
    bus = 2 * (n - 1) / n * large[0] / max(large[1] - latency, 1e-9)
    return replace(found, fabric_size=(2, max(n, 3)), fabric_bytes_s=(bus, bus), fabric_latency_s=latency, fabric_hop_s=0.0)


def _fit_host(found: Rates, samples: Measured, config: RunConfig) -> Rates:
    elements, update_s = samples.adamw
    found = replace(found, optimizer_bytes=update_s / elements * found.hbm_bytes_s * found.hbm_efficiency)
    rest = [(m, seconds - float(step_s(_workload(config, samples.ranks, m), found))) for m, seconds in samples.steps]
    (few, low), (many, high) = rest[0], rest[-1]
    per_microbatch = max((high - low) / (many - few), 0.0)
    return replace(found, microbatch_s=per_microbatch, step_s=max(low - few * per_microbatch, 0.0))


def _workload(config: RunConfig, ranks: int, microbatches: int) -> Workload:
    batch = config.batch.model_copy(update={"global_batch": config.batch.micro_batch * microbatches})
    parallel = config.parallel.model_copy(update={"tensor": ranks, "pipeline": 1, "data": None})
    return from_config(config.model_copy(update={"batch": batch, "parallel": parallel}), ranks)


def machine_content(samples: Measured, config: RunConfig, when: str) -> dict[str, Any]:
    """The machine file's mapping: `local` with every calibrated number replaced, tagged and sourced."""
    found = calibrated_rates(samples, config, rates(load_machine("local")))
    source = (
        f"frontier-llm calibrate, {when}: {samples.ranks} ranks at once, {samples.device}, {samples.dtype}, shapes of {config.model.name}"
    )

    def number(value: float, tag: str = "measured") -> dict[str, Any]:
        return {"value": float(f"{value:.5g}"), "tag": tag, "source": source}

    stack: Mapping[str, float] = {
        "gemm_efficiency": found.gemm_efficiency,
        "gemm_k_half": found.gemm_k_half,
        "flash_efficiency": found.flash_efficiency,
        "flash_backward": found.flash_backward,
        "hbm_efficiency": found.hbm_efficiency,
        "kernel_us": found.kernel_s * 1e6,
        "launch_us": found.launch_s * 1e6,
        "microbatch_us": found.microbatch_s * 1e6,
        "step_us": found.step_s * 1e6,
    }
    fabric = dict(zip(found.fabric_size, found.fabric_bytes_s, strict=True))
    return {
        "base": "local",
        "title": f"this computer, calibrated {when}",
        "device": {
            "name": f"{samples.device}, one of {samples.ranks} ranks",
            "peak_tflops": number(found.peak_flops / 1e12),
            "memory_gib": number(found.memory_bytes / 2**30),
            "memory_gbps": number(found.hbm_bytes_s / 1e9),
        },
        "node": {
            "devices": number(samples.ranks),
            "fabric_gbps": {size: number(speed / 1e9) for size, speed in fabric.items()},
            "fabric_latency_us": number(found.fabric_latency_s * 1e6),
            "fabric_hop_us": number(found.fabric_hop_s * 1e6),
        },
        "stacks": {
            STACK: {**{key: number(value) for key, value in stack.items()}, "optimizer_bytes": float(f"{found.optimizer_bytes:.4g}")}
        },
    }


def report(samples: Measured, config: RunConfig) -> str:
    """The calibrated constants and how well they give back the samples."""
    found = calibrated_rates(samples, config, rates(load_machine("local")))
    M, N, K, seconds = (np.array(column, dtype=float) for column in zip(*samples.gemm, strict=True))
    errors = np.asarray(gemm_s(M, N, K, found)) / seconds - 1
    lines = [
        f"matrix products: up to {found.peak_flops / 1e12:.3g} TFLOP/s per rank; formula against {len(errors)} samples: mean error {100 * np.mean(np.abs(errors)):.0f} %",
        f"memory {found.hbm_bytes_s / 1e9:.3g} GB/s per rank, elementwise ops reach {100 * found.hbm_efficiency:.0f} % of it",
        f"one operation costs {found.kernel_s * 1e6:.1f} us to dispatch",
    ]
    if samples.all_reduce:
        lines.append(
            f"all-reduce over {samples.ranks} ranks: {found.fabric_latency_s * 1e6:.0f} us + {found.fabric_bytes_s[0] / 1e9:.2g} GB/s bus bandwidth"
        )
    lines.append(f"host: {found.microbatch_s * 1e3:.2g} ms per microbatch, {found.step_s * 1e3:.2g} ms per step")
    return "\n".join(lines)
