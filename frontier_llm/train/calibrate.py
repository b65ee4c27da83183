"""Micro-benchmarks of this machine with the model's own shapes and the run's own ops: what `planner.calibration` fits a machine file to.

Every rank measures at the same time, because ranks of one computer share its cores, caches and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from frontier_llm.comm import Mesh, all_reduce_, barrier
from frontier_llm.config import RunConfig
from frontier_llm.data.loader import open_batches
from frontier_llm.model import working_dtype
from frontier_llm.ops import Ops, select_ops
from frontier_llm.topology import make_plan
from frontier_llm.train.bench import gemm_shapes
from frontier_llm.train.build import build_state
from frontier_llm.train.clock import median_s
from frontier_llm.train.step import train_step

MESSAGE_BYTES = tuple(2**power for power in range(10, 25, 2))  # 1 KiB … 16 MiB
COPY_ELEMENTS = 8 * 2**20
STEP_MICROBATCHES = (1, 4)


@dataclass
class Samples:
    """What was measured, in seconds; the fields' tuples end with the time."""

    ranks: int
    device: str
    dtype: str
    memory_bytes: float  # of the device, or this rank's part of the computer's memory
    gemm: list[tuple[int, int, int, float]] = field(default_factory=list)  # M, N, K
    attention: list[tuple[int, int, int, int, float, float]] = field(default_factory=list)  # B, heads, S, D, forward, backward
    elementwise_s: float = 0.0  # forward norms, activation and residual of one layer
    copy: tuple[float, float] = (1.0, 1.0)  # bytes read and written
    dispatch_s: float = 0.0  # one tiny operation
    adamw: tuple[float, float] = (1.0, 1.0)  # elements
    all_reduce: list[tuple[int, float]] = field(default_factory=list)  # bytes, over all ranks
    steps: list[tuple[int, float]] = field(default_factory=list)  # microbatches, whole training step with tp = ranks


def measure(config: RunConfig, mesh: Mesh, device: torch.device, memory_bytes: float, repeats: int = 5) -> Samples:
    """All samples of one rank; collective over the world, whose tensor degree is its size."""
    dtype = working_dtype(config.precision.dtype)
    ops = select_ops(config.ops, device.type, dtype)
    samples = Samples(mesh.world.size, device.type, config.precision.dtype, memory_bytes)

    def timed(run: Callable[[], object]) -> float:
        return median_s(run, repeats, device, before=lambda: barrier(mesh.world))

    model, batch = config.model, config.batch.micro_batch
    for tp in sorted({1, mesh.tp.size}):
        for _, M, N, K, _ in gemm_shapes(model, batch * model.sequence_length, tp):
            x, w, g = (torch.randn(shape, dtype=dtype, device=device) for shape in ((M, K), (N, K), (M, N)))
            for (rows, columns, inner), product in (
                ((M, N, K), lambda: x @ w.T),  # noqa: B023
                ((M, K, N), lambda: g @ w),  # noqa: B023
                ((N, K, M), lambda: g.T @ x),  # noqa: B023
            ):
                samples.gemm.append((rows, columns, inner, timed(product)))
        samples.attention.append(_attention(config, ops, tp, dtype, device, timed))
    samples.elementwise_s = _elementwise(config, ops, mesh.tp.size, dtype, device, timed)
    source = torch.zeros(COPY_ELEMENTS, device=device)
    target = torch.empty_like(source)
    samples.copy = (2.0 * source.numel() * 4, timed(lambda: target.copy_(source)))
    one = torch.ones(1, device=device)
    samples.dispatch_s = timed(lambda: [one.add_(0.0) for _ in range(200)]) / 200
    samples.adamw = _adamw(ops, dtype, device, timed)
    if mesh.tp.size > 1:
        for size in MESSAGE_BYTES:
            x = torch.zeros(size // 4, device=device)
            samples.all_reduce.append((size, timed(lambda: all_reduce_(x, mesh.tp))))  # noqa: B023
    samples.steps = [(m, _step(config, mesh, device, m, repeats)) for m in STEP_MICROBATCHES]
    return samples


def _attention(
    config: RunConfig, ops: Ops, tp: int, dtype: torch.dtype, device: torch.device, timed: Callable[[Callable[[], object]], float]
) -> tuple[int, int, int, int, float, float]:
    model, B = config.model, config.batch.micro_batch
    S, D, a, g = model.sequence_length, model.dim_per_head, model.heads // tp, model.num_kv_heads // tp
    q, k, v = (torch.randn(S, B, heads, D, dtype=dtype, device=device, requires_grad=True) for heads in (a, g, g))

    def forward() -> Any:
        return ops.attention(q, k, v, scale=D**-0.5, alibi_slopes_a=None, documents_BS=None)

    grad = torch.randn_like(forward())
    forward_s = timed(forward)
    both_s = timed(lambda: torch.autograd.backward(forward(), grad))
    return B, a, S, D, forward_s, max(both_s - forward_s, 0.5 * forward_s)


def _elementwise(
    config: RunConfig, ops: Ops, tp: int, dtype: torch.dtype, device: torch.device, timed: Callable[[Callable[[], object]], float]
) -> float:
    model = config.model
    tokens = (model.sequence_length, config.batch.micro_batch)
    x, residual = (torch.randn(*tokens, model.hidden, dtype=dtype, device=device) for _ in range(2))
    weight = torch.ones(model.hidden, dtype=dtype, device=device)
    inner = torch.randn(*tokens, (2 if model.gated else 1) * model.ffn_hidden // tp, dtype=dtype, device=device)

    def layer() -> None:
        if model.norm == "rmsnorm":
            ops.rms_norm(x, weight, model.norm_eps)
        else:
            ops.layer_norm(x, weight, None, model.norm_eps)
        ops.add_norm(x, residual, weight, None, model.norm_eps, model.norm)
        if model.gated:
            ops.swiglu(inner.unflatten(-1, (2, -1)))
        else:
            ops.gelu(inner, None, model.activation == "gelu_tanh")
        x.add(residual)

    return timed(layer)


def _adamw(ops: Ops, dtype: torch.dtype, device: torch.device, timed: Callable[[Callable[[], object]], float]) -> tuple[float, float]:
    size = COPY_ELEMENTS // 4
    master, gradient, first, second = (torch.zeros(size, device=device) for _ in range(4))
    weight = torch.zeros(size, dtype=dtype, device=device)
    seconds = timed(
        lambda: ops.adamw_(
            master, gradient, first, second, weight, lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1, grad_scale=1.0
        )
    )
    return float(size), seconds


def _step(config: RunConfig, mesh: Mesh, device: torch.device, microbatches: int, repeats: int) -> float:
    """Seconds of a whole training step of `microbatches` microbatches, tensor degree = ranks."""
    batch = config.batch.model_copy(update={"global_batch": config.batch.micro_batch * microbatches})
    config = config.model_copy(update={"batch": batch})
    batches = open_batches(config, mesh.dp.rank, mesh.dp.size)
    assert batches is not None
    state = build_state(config, make_plan(config, mesh.world.size), mesh, device, batches)
    return median_s(lambda: train_step(state), repeats, device, before=lambda: barrier(mesh.world))
