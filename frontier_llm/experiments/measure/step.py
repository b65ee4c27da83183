"""`bench step`: FLOP/s of a training step compared with the FLOP/s of the model's matrix products alone.

Steps and products are measured alternately in the same run, so that other load and throttling slow both equally.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from frontier_llm.blueprint.work import model_flops_per_token
from frontier_llm.comm import all_reduce_, barrier
from frontier_llm.experiments.measure.op_cases import gemm_shapes, operands
from frontier_llm.experiments.measure.timing import median_s, wall_s
from frontier_llm.ops import working_dtype
from frontier_llm.ops.dtypes import product_dtype
from frontier_llm.training.build import TrainState
from frontier_llm.training.clock import PhaseClock
from frontier_llm.training.step import train_step
from frontier_llm.units import TERA

GEMM_REPEATS = 2  # repetitions of each product per round


@dataclass(frozen=True)
class StepBench:
    """Result of one rank. Values are medians over the measured steps."""

    step_times_s: list[float]  # seconds of every measured step
    cpu_times_s: list[float]  # CPU seconds of each step, summed over ranks; stays comparable on a shared machine
    tokens_per_s: float  # rate of the complete job in the median step
    step_time_s: float
    model_tflops: float  # TFLOP/s per device, full-attention convention (`model_flops_per_token`)
    gemm_tflops: float  # mean TFLOP/s of the model's matrix products, weighted by their FLOPs
    fraction_of_gemm: float  # model_tflops / gemm_tflops
    phases_s: dict[str, float]  # this rank's seconds of compute by phase, and seconds blocked on each axis
    gemms: list[dict[str, Any]]


def measure_gemms(state: TrainState) -> list[dict[str, Any]]:
    """Return the TFLOP/s of each product of the model with torch's own kernels, in the working precision.

    On a CPU that emulates bf16, products are measured in fp32, which torch computes at the CPU's full rate.

    A row covers the forward, input-gradient and weight-gradient product together.
    """
    config = state.config
    clock = partial(wall_s, device=state.device)
    dtype = product_dtype(working_dtype(config.precision.dtype), state.device)
    tokens = config.batch.micro_batch * config.model.sequence_length
    rows = []
    for name, M, N, K, count in gemm_shapes(config.model, tokens, state.mesh.tp.size):
        x, w, g = operands(M, N, K, dtype, state.device)
        products = (lambda: x @ w.T, lambda: g @ w, lambda: g.T @ x)  # noqa: B023
        seconds = sum(median_s(product, GEMM_REPEATS, clock) for product in products)
        tflops = 6 * M * N * K / seconds / TERA
        rows.append({"name": name, "M": M, "N": N, "K": K, "count": count, "tflops": tflops, "seconds": seconds})
    return rows


def bench_step(state: TrainState, steps: int, warmup: int = 2) -> StepBench:
    """Time `steps` training steps after `warmup` steps. Collective over the world."""
    for _ in range(warmup):
        train_step(state)
    clock = PhaseClock(state.mesh.ledger, synchronize=True)
    clock.attach(state)
    times = []
    cpu_times = []
    gemm_rounds = []
    phases: dict[str, float] = defaultdict(float)
    for _ in range(steps):
        clock.enter("bench")
        gemm_rounds.append(measure_gemms(state))
        barrier(state.mesh.world)
        clock.take()  # drops the time of the products and of the barrier, which are no part of the step
        clock.enter("optimizer")  # the step resets the gradients before its first action, which counts as "optimizer"
        cpu_begin_s = time.process_time()
        times.append(wall_s(lambda: train_step(state), state.device))
        cpu = torch.tensor(time.process_time() - cpu_begin_s, dtype=torch.float64, device=state.device)
        for name, seconds in clock.take().items():
            phases[name] += seconds / steps
        cpu_times.append(float(all_reduce_(cpu, state.mesh.world)))
    phases.pop("bench", None)
    return _summarise(state, times, cpu_times, gemm_rounds, phases)


def _summarise(
    state: TrainState,
    times: list[float],
    cpu_times: list[float],
    gemm_rounds: list[list[dict[str, Any]]],
    phases: dict[str, float],
) -> StepBench:
    config = state.config
    devices = state.mesh.world.size
    step_s = median(times)
    tokens = config.batch.global_batch * config.model.sequence_length
    achieved = tokens * model_flops_per_token(config.model) / step_s / devices / TERA
    best = [max(rounds, key=lambda gemm: gemm["tflops"]) for rounds in zip(*gemm_rounds, strict=True)]
    flops = sum(6.0 * gemm["M"] * gemm["N"] * gemm["K"] * gemm["count"] for gemm in best)
    rate = flops / sum(gemm["seconds"] * gemm["count"] for gemm in best) / TERA
    return StepBench(
        step_times_s=times,
        cpu_times_s=cpu_times,
        tokens_per_s=tokens / step_s,
        step_time_s=step_s,
        model_tflops=achieved,
        gemm_tflops=rate,
        fraction_of_gemm=achieved / rate,
        phases_s=phases,
        gemms=best,
    )
