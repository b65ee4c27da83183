"""Fit a cluster's constants on the stated half of its measurements (`Measurement.fitted`), and on nothing finer.

Robust least squares on log(predicted / measured): a residual beyond `KNEE` counts linearly, because published tables hold
stalled runs that no constant should bend towards. A weak prior keeps constants that the data do not determine where engineering
puts them. scripts/fit_machines.py writes the result into the machine files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from frontier_llm.costs.time import step_s
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.datasets import Measurement, stack_workloads

KNEE = 0.03  # of log time
PRIOR = 0.003  # weight of (log constant - log start)² against one row
CEILING = 1.0  # efficiencies are shares

COMPUTE = ("gemm_efficiency", "gemm_k_half", "hbm_efficiency", "kernel_s", "step_s")
TENSOR = ("fabric_bytes_s", "fabric_latency_s")
SPREAD = ("network_efficiency", "network_crowding")

# what the rows of each (machine, stack) can determine
KEYS: dict[tuple[str, str], tuple[str, ...]] = {
    ("vtrain-a100", "megatron-lm"): (*COMPUTE, *TENSOR, *SPREAD, "microbatch_s", "network_latency_s"),
    ("vtrain-a100-node", "megatron-lm"): (*COMPUTE, *TENSOR, "launch_s", "microbatch_s", "fabric_hop_s"),
    ("selene", "megatron-lm"): ("gemm_efficiency", "hbm_efficiency", "kernel_s", *TENSOR, *SPREAD),
    ("jean-zay", "megatron-deepspeed"): (*COMPUTE, *TENSOR, *SPREAD, "unaligned_penalty"),
    ("llm-foundry-a100", "llm-foundry"): (*COMPUTE, "flash_efficiency", "flash_backward"),
    ("llm-foundry-a100-40", "llm-foundry"): (*COMPUTE, "flash_efficiency", "flash_backward", "network_efficiency"),
    ("llm-foundry-h100", "llm-foundry"): (*COMPUTE, "flash_efficiency", "flash_backward", "network_efficiency"),
    ("llm-foundry-h100", "llm-foundry-fp8"): ("gemm_efficiency",),
    ("torchtitan-a100", "torchtitan"): ("gemm_efficiency", "flash_efficiency", "network_efficiency"),
    ("eos", "megatron-core"): ("gemm_efficiency", "hbm_efficiency"),
    ("frontier", "gpt-neox"): ("unaligned_penalty",),
}


def fit(rows: Sequence[Measurement], start: Rates, keys: Sequence[str], iterations: int = 100) -> Rates:
    """`start` with `keys` changed to suit `rows` best."""
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
    """`start` with each key multiplied by exp(x); a tuple is scaled as a whole, shares stay at most 1."""
    changes: dict[str, float | tuple[float, ...]] = {}
    for key, shift in zip(keys, x, strict=True):
        value = getattr(start, key)
        if isinstance(value, tuple):
            changes[key] = tuple(float(one * np.exp(shift)) for one in value)
        else:
            grown = float(value * np.exp(shift))
            changes[key] = min(grown, CEILING) if key.endswith(("efficiency", "crowding")) else grown
    return replace(start, **changes)  # type: ignore[arg-type]


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
