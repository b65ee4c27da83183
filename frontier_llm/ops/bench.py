"""Times each op against plain eager torch at a model's shapes, interleaved: the two take turns, because a busy machine moves both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frontier_llm.config.schema import ModelConfig
from frontier_llm.ops.face import Ops


@dataclass(frozen=True)
class Comparison:
    """Best times of one op, forward and backward together where it has both."""

    op: str
    ours_s: float
    eager_s: float
    bytes_moved: int  # what must at least be read and written; 0 for products
    flops: float  # 0 for what is bound by memory


Case = tuple[str, Callable[[], Any], Callable[[], Any], int, float]


def compare(ops: Ops, model: ModelConfig, micro_batch: int, dtype: torch.dtype, device: str, rounds: int = 7) -> list[Comparison]:
    """Every op at the shapes of one microbatch on one rank; `rounds` turns each, the best counts."""
    results = []
    for name, ours, eager, size, flops in _cases(ops, model, micro_batch, dtype, torch.device(device)):
        best = [float("inf"), float("inf")]
        for turn in range(rounds + 1):
            for index, run in enumerate((ours, eager)):
                seconds = _seconds(run, device)
                if turn:  # the first turn warms up
                    best[index] = min(best[index], seconds)
        results.append(Comparison(name, best[0], best[1], size, flops))
    return results


def copy_bandwidth(device: str, size_bytes: int = 256 * 2**20) -> float:
    """Bytes read and written per second by a plain copy: the ceiling of the ops that are bound by memory."""
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / min(_seconds(lambda: target.copy_(source), device) for _ in range(5))


def _seconds(run: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _trained(function: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor]) -> Callable[[], None]:
    """Forward and backward of a differentiable op."""

    def run() -> None:
        outputs = function(*inputs)
        torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), grads)
        for x in inputs:
            x.grad = None

    return run


def _cases(ops: Ops, model: ModelConfig, micro_batch: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """(name, ours, eager, bytes, flops) of each op."""
    grouped = model.num_kv_heads != model.heads
    S, B, H, A, D = model.sequence_length, micro_batch, model.hidden, model.heads, model.dim_per_head
    N, width = S * B, torch.finfo(dtype).bits // 8

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device).requires_grad_()

    def grad(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    q, k, v = leaf(S, B, A, D), leaf(S, B, model.num_kv_heads, D), leaf(S, B, model.num_kv_heads, D)
    x, residual, weight = leaf(N, H), leaf(N, H), leaf(H)
    gate_up, wide, bias = leaf(N, 2, model.ffn_hidden), leaf(N, model.ffn_hidden), leaf(model.ffn_hidden)
    angle = torch.randn(S, D // 2, device=device)
    cos, sin, cos2, sin2 = angle.cos(), angle.sin(), *(f(angle).repeat(1, 2)[:, None, None].to(dtype) for f in (torch.cos, torch.sin))

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.permute(1, 2, 0, 3) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).permute(2, 0, 1, 3)

    def eager_rope(q: Tensor) -> Tensor:
        first, second = q.chunk(2, -1)
        return q * cos2 + torch.cat((-second, first), -1) * sin2

    def eager_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (H,), weight, model.norm_eps), total

    def pair(
        name: str,
        ours: Callable[..., Any],
        eager: Callable[..., Any],
        inputs: list[Tensor],
        grads: list[Tensor],
        size: int,
        flops: float = 0.0,
    ) -> Case:
        return name, _trained(ours, inputs, grads), _trained(eager, inputs, grads), size, flops

    rows, row = N * H * width, [grad(N, H)]
    attention = [q, k, v]
    return [
        pair("attention", lambda q, k, v: ops.attention(q, k, v, scale=D**-0.5), sdpa, attention, [grad(S, B, A, D)], 0, 7.0 * S * S * B * A * D),
        pair("rms_norm", lambda x, w: ops.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (H,), w, 1e-5), [x, weight], row, 5 * rows),
        pair("layer_norm", lambda x, w: ops.layer_norm(x, w, None, 1e-5), lambda x, w: F.layer_norm(x, (H,), w, None, 1e-5), [x, weight], row, 5 * rows),
        pair("add_norm", lambda x, r, w: ops.add_norm(x, r, w, None, 1e-5, "rmsnorm"), eager_add_norm, [x, residual, weight], row * 2, 8 * rows),
        pair("rope", lambda q: ops.rope(q, cos, sin), eager_rope, [q], [grad(S, B, A, D)], 4 * q.numel() * width),
        pair("swiglu", ops.swiglu, lambda y: F.silu(y[:, 0]) * y[:, 1], [gate_up], [grad(N, model.ffn_hidden)], 4 * gate_up.numel() * width),
        pair("gelu", lambda y, b: ops.gelu(y, b, False), lambda y, b: F.gelu(y + b), [wide, bias], [grad(N, model.ffn_hidden)], 5 * wide.numel() * width),
        *_buffer_cases(ops, model, N, dtype, device),
    ]  # fmt: skip


def _buffer_cases(ops: Ops, model: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Cross-entropy, products and the passes over flat buffers."""
    width, H = torch.finfo(dtype).bits // 8, model.hidden
    logits = torch.randn(rows, model.vocab_size, dtype=dtype, device=device)
    targets = torch.randint(0, model.vocab_size, (rows,), device=device)
    ones, leaf = torch.ones(rows, device=device), logits.clone().requires_grad_()

    def loss() -> None:
        stats = ops.cross_entropy_stats(logits, targets, 0)
        ops.cross_entropy_backward_(logits, targets, 0, stats[0] + stats[1].log(), ones)

    def eager_loss() -> None:
        F.cross_entropy(leaf.float(), targets).backward()
        leaf.grad = None

    x, weight, grad = (
        torch.randn(shape, dtype=dtype, device=device) for shape in ((rows, H), (model.ffn_hidden, H), (rows, model.ffn_hidden))
    )
    main_grad = torch.zeros(model.ffn_hidden, H, device=device)
    count = 4 * H * model.ffn_hidden
    master, gradient, exp_avg, exp_avg_sq = (torch.zeros(count, device=device) for _ in range(4))
    low, parameter = torch.zeros(count, dtype=dtype, device=device), torch.zeros(count, device=device).requires_grad_()
    parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter], foreach=True)

    def adamw() -> None:
        options: dict[str, float] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        ops.adamw_(master, gradient, exp_avg, exp_avg_sq, low, step=1, grad_scale=1.0, **options)

    def eager_adamw() -> None:
        optimizer.step()
        low.copy_(parameter.detach())

    flops = 2.0 * rows * H * model.ffn_hidden
    small = torch.randn(count, dtype=dtype, device=device)
    return [
        ("cross_entropy", loss, eager_loss, 3 * logits.numel() * width, 0.0),
        ("linear", lambda: ops.linear(x, weight), lambda: F.linear(x, weight), 0, flops),
        ("linear_input_gradient", lambda: ops.linear_input_gradient(grad, weight), lambda: grad @ weight, 0, flops),
        ("weight_gradient", lambda: ops.accumulate_weight_gradient_(main_grad, grad, x), lambda: main_grad.add_(grad.t() @ x), 0, flops),
        ("adamw", adamw, eager_adamw, count * (28 + width), 0.0),
        ("sum_of_squares", lambda: ops.sum_of_squares(gradient), lambda: gradient.double().square().sum(), count * 4, 0.0),
        ("accumulate", lambda: ops.accumulate_(exp_avg, small), lambda: exp_avg.add_(small), count * (8 + width), 0.0),
    ]
