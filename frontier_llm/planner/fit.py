"""Fit a cluster's constants on the stated half of its measurements (`Measurement.fitted`), and on nothing finer.

Robust least squares on log(predicted / measured): a residual beyond `KNEE` counts linearly, because published tables hold
stalled runs that no constant should bend towards. A weak prior keeps constants that the data do not determine where engineering
puts them. scripts/fit_machines.py writes the result into the machine files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from frontier_llm.costs.time import step_s
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.datasets import Measurement, stack_workloads
from frontier_llm.planner.predict import complete

KNEE = 0.03  # of log time
PRIOR = 0.003  # weight of (log constant - log start)² against one row
CEILING = 1.0  # efficiencies are shares

COMPUTE = ("gemm_efficiency", "gemm_k_half", "hbm_efficiency", "kernel_s", "step_s")
TENSOR = ("fabric_bytes_s/2", "fabric_bytes_s/4", "fabric_bytes_s/8", "fabric_latency_s")
SPREAD = ("network_efficiency", "network_crowding")

# what the rows of each (machine, stack) can determine
KEYS: dict[tuple[str, str], tuple[str, ...]] = {
    ("vtrain-a100", "megatron-lm"): (*COMPUTE, *TENSOR, *SPREAD, "microbatch_s", "network_latency_s"),
    ("vtrain-a100-node", "megatron-lm"): (*COMPUTE, *TENSOR, "launch_s", "microbatch_s", "fabric_hop_s"),
    ("selene", "megatron-lm"): ("gemm_efficiency", "hbm_efficiency", "kernel_s", "fabric_bytes_s", "fabric_latency_s", *SPREAD),
    ("jean-zay", "megatron-deepspeed"): (*COMPUTE, *TENSOR, *SPREAD, "microbatch_s", "network_latency_s", "unaligned_penalty"),
    ("llm-foundry-a100", "llm-foundry"): (*COMPUTE, "flash_efficiency", "flash_backward"),
    ("llm-foundry-a100-40", "llm-foundry"): (*COMPUTE, "flash_efficiency", "flash_backward", "network_efficiency"),
    ("llm-foundry-h100", "llm-foundry"): (*COMPUTE, "flash_efficiency", "flash_backward", "network_efficiency"),
    ("llm-foundry-h100", "llm-foundry-fp8"): ("linear_speedup",),
    ("torchtitan-a100", "torchtitan"): ("gemm_efficiency", "flash_efficiency", "network_efficiency"),
    ("torchtitan-h100", "torchtitan"): ("gemm_efficiency",),
    ("eos", "megatron-core"): ("gemm_efficiency", "hbm_efficiency"),
    ("eos", "megatron-core-fp8"): ("linear_speedup",),
    ("frontier", "gpt-neox"): ("unaligned_penalty", "fabric_share"),
}


# where each constant starts, and what the weak prior holds it to; the file's own value would drift from fit to fit
START = {
    "gemm_efficiency": 0.8, "gemm_k_half": 100.0, "unaligned_penalty": 4.0, "flash_efficiency": 0.6, "flash_backward": 0.75,
    "hbm_efficiency": 0.75, "kernel_s": 8e-6, "launch_s": 30e-6, "microbatch_s": 5e-4, "step_s": 2e-2, "fabric_latency_s": 20e-6,
    "fabric_hop_s": 2e-6, "network_efficiency": 0.8, "network_crowding": 0.8, "network_latency_s": 25e-6, "fabric_share": 0.4,
    "linear_speedup": 1.6,
}  # fmt: skip
START_OF: dict[str, dict[str, float]] = {
    "llm-foundry-h100": {"gemm_efficiency": 0.65, "flash_efficiency": 0.4, "flash_backward": 0.6},
    "eos": {"gemm_efficiency": 0.7, "flash_efficiency": 0.5},
    "frontier": {"unaligned_penalty": 2.0},
}
FABRIC_START, FABRIC_CEILING = 240e9, 300e9  # NVLink 3 on A100: what large messages reach, and the link rate, bytes/s


def starting_point(machine: str, numbers: Rates, keys: Sequence[str]) -> Rates:
    """`numbers` with the constants that are to be fitted set back to where every fit starts."""
    values = {**START, **START_OF.get(machine, {})}
    constants: dict[str, Any] = {key: values[key] for key in keys if "fabric_bytes" not in key}
    if any("fabric_bytes" in key for key in keys):
        constants["fabric_bytes_s"] = tuple(FABRIC_START for _ in numbers.fabric_bytes_s)
    return replace(numbers, **constants)


def fit(rows: Sequence[Measurement], start: Rates, keys: Sequence[str], iterations: int = 100) -> Rates:
    """`start` with `keys` changed to suit `rows` best."""
    rows = [replace(row, workload=complete(row, start)) for row in rows]
    workload, seconds = stack_workloads(rows), np.array([row.seconds for row in rows])

    def residual(x: np.ndarray) -> np.ndarray:
        error = np.log(np.asarray(step_s(workload, apply(start, keys, x)), dtype=float) / seconds)
        return np.concatenate([soften(error), np.sqrt(PRIOR) * x])

    return apply(start, keys, minimise(residual, len(keys), iterations))


def soften(error: np.ndarray) -> np.ndarray:
    """Residuals whose squares are Huber's loss with knee `KNEE`."""
    size = np.abs(error)
    return np.sign(error) * np.where(size < KNEE, size, np.sqrt(np.maximum(2 * KNEE * size - KNEE**2, 0.0)))


def apply(start: Rates, keys: Sequence[str], x: np.ndarray) -> Rates:
    """`start` with each key multiplied by exp(x); shares stay at most 1.

    A tuple is scaled as a whole, or, with the key's suffix "/N", in its entry for groups of N devices.
    """
    changes: dict[str, Any] = {}
    for key, shift in zip(keys, x, strict=True):
        name, _, ranks = key.partition("/")
        value = changes.get(name, getattr(start, name))
        if ranks:
            at = start.fabric_size.index(int(ranks))
            changes[name] = (*value[:at], min(float(value[at] * np.exp(shift)), FABRIC_CEILING), *value[at + 1 :])
        elif isinstance(value, tuple):
            changes[key] = tuple(min(float(one * np.exp(shift)), FABRIC_CEILING) for one in value)
        else:
            grown = float(value * np.exp(shift))
            changes[key] = min(grown, CEILING) if key.endswith(("efficiency", "crowding")) else grown
    return replace(start, **changes)


def minimise(residual: Callable[[np.ndarray], np.ndarray], size: int, iterations: int) -> np.ndarray:
    """Levenberg-Marquardt from 0 with a numerical Jacobian; steps are clipped to a factor e^0.5 per constant."""
    x, damping = np.zeros(size), 1e-2
    current = residual(x)
    for _ in range(iterations):
        jacobian = np.stack([(residual(x + 1e-3 * row) - current) / 1e-3 for row in np.eye(size)], axis=1)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ current
        scale = np.diag(np.maximum(np.diag(normal), 1e-9))
        while damping < 1e8:
            step = np.clip(np.linalg.solve(normal + damping * scale, -slope), -0.5, 0.5)
            trial = residual(x + step)
            if trial @ trial < current @ current:
                break
            damping *= 4
        else:
            return x
        gain = current @ current - trial @ trial
        x, current, damping = x + step, trial, damping * 0.3
        if gain < 1e-7 * (current @ current):
            return x
    return x
