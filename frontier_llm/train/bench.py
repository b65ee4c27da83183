"""`bench step`: how fast this rank's device multiplies matrices of the model's own shapes, and what share of that the step reaches.

Both are measured in the same run, interleaved, because a busy or throttled machine moves both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from frontier_llm.comm import barrier
from frontier_llm.config import ModelConfig
from frontier_llm.costs.flops import model_flops_per_token
from frontier_llm.ops import working_dtype
from frontier_llm.train.build import TrainState
from frontier_llm.train.clock import PhaseClock, median_s
from frontier_llm.train.step import train_step
from frontier_llm.units import TERA


@dataclass(frozen=True)
class StepBench:
    """One rank's measurement, medians over the measured steps."""

    step_times_s: list[float]  # every measured step
    tokens_per_s: float  # of the job, by the median step
    step_time_s: float
    model_tflops: float  # per device, full-attention convention (costs.flops)
    gemm_tflops: float  # the model's products weighted by their FLOPs
    fraction_of_gemm: float
    phases_s: dict[str, float]  # of this rank: compute by phase, and the time blocked on each axis
    gemms: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def gemm_shapes(model: ModelConfig, tokens: int, tp: int) -> list[tuple[str, int, int, int, int]]:
    """(name, M, N, K, count per microbatch) of the forward products on one tensor-parallel rank; backward has twice as many FLOPs."""
    H, D, F = model.hidden, model.dim_per_head, model.ffn_hidden
    qkv = (model.heads + 2 * model.num_kv_heads) * D // tp
    return [
        ("qkv", tokens, qkv, H, model.layers),
        ("attention output", tokens, H, model.heads * D // tp, model.layers),
        ("mlp up", tokens, (2 if model.gated else 1) * F // tp, H, model.layers),
        ("mlp down", tokens, H, F // tp, model.layers),
        ("head", tokens, model.vocab_size // tp, H, 1),
    ]


def measure_gemms(state: TrainState, repeats: int = 5) -> list[dict[str, Any]]:
    """TFLOP/s of each forward, input-gradient and weight-gradient product as torch gives them, in the working precision."""
    config = state.config
    dtype = working_dtype(config.precision.dtype)
    tokens = config.batch.micro_batch * config.model.sequence_length
    results = []
    for name, M, N, K, count in gemm_shapes(config.model, tokens, state.mesh.tp.size):
        x, w, g = (torch.randn(shape, dtype=dtype, device=state.device) for shape in ((M, K), (N, K), (M, N)))
        products: tuple[Callable[[], torch.Tensor], ...] = (lambda: x @ w.T, lambda: g @ w, lambda: g.T @ x)  # noqa: B023
        seconds = sum(median_s(product, repeats, state.device) for product in products)
        results.append({"name": name, "M": M, "N": N, "K": K, "count": count, "tflops": 6 * M * N * K / seconds / TERA, "seconds": seconds})
    return results


def bench_step(state: TrainState, steps: int, warmup: int = 2) -> StepBench:
    """Time `steps` training steps after `warmup`. Collective over the world."""
    for _ in range(warmup):
        train_step(state)
    clock = PhaseClock(state.mesh.ledger, synchronize=True)
    clock.attach(state)
    times, gemm_rounds = [], []
    clock.take()
    for _ in range(steps):
        clock.enter("bench")
        gemm_rounds.append(measure_gemms(state, repeats=2))
        barrier(state.mesh.world)
        clock.enter("optimizer")  # the gradients' reset comes before the first action
        begin = time.perf_counter()
        train_step(state)
        clock.enter("bench")
        times.append(time.perf_counter() - begin)
    phases = {name: seconds / steps for name, seconds in clock.take().items() if name != "bench"}
    return _summarise(state, times, gemm_rounds, phases)


def _summarise(state: TrainState, times: list[float], gemm_rounds: list[list[dict[str, Any]]], phases: dict[str, float]) -> StepBench:
    config, devices, step_s = state.config, state.mesh.world.size, median(times)
    tokens = config.batch.global_batch * config.model.sequence_length
    achieved = tokens * model_flops_per_token(config.model) / step_s / devices / TERA
    best = [max(rounds, key=lambda gemm: gemm["tflops"]) for rounds in zip(*gemm_rounds, strict=True)]
    flops = sum(6.0 * gemm["M"] * gemm["N"] * gemm["K"] * gemm["count"] for gemm in best)
    rate = flops / sum(gemm["seconds"] * gemm["count"] for gemm in best) / TERA
    return StepBench(times, tokens / step_s, step_s, achieved, rate, achieved / rate, phases, best)
