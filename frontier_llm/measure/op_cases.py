"""What `bench` times: each op at the shapes of one microbatch on one rank, and the ways to compute the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from frontier_llm.config.schema import ModelConfig
from frontier_llm.ops import sdpa
from frontier_llm.ops.face import AdamWUpdate, Ops, Scores

SDPA_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One op: the ways to compute it, each a function that does it once."""

    ways: Mapping[str, Run]
    bytes_moved: int = 0
    flops: float = 0.0


@dataclass(frozen=True)
class Shapes:
    """Sizes of one microbatch on one rank, and tensors of them."""

    model: ModelConfig
    micro_batch: int
    dtype: torch.dtype
    device: torch.device

    @property
    def rows(self) -> int:
        """Tokens N = S * B."""
        return self.model.sequence_length * self.micro_batch

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers."""
        return torch.randn(*shape, dtype=dtype or self.dtype, device=self.device)

    def leaf(self, *shape: int) -> Tensor:
        """Normal numbers that want a gradient."""
        return self.random(*shape).requires_grad_()


def _trained(function: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor]) -> Run:
    """Forward and backward of a differentiable op."""

    def run() -> None:
        outputs = function(*inputs)
        torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), grads)
        for x in inputs:
            x.grad = None

    return run


def _versus(ours: Callable[..., Any], eager: Callable[..., Any], compiler: Callable[..., Any] | None) -> dict[str, Callable[..., Any]]:
    """The ways to compare: ours and eager torch, or with a compiler eager torch through it alone."""
    return {"ours": ours, "eager": eager} if compiler is None else {"compiled": compiler(eager)}


def _differentiable(
    ours: Callable[..., Any],
    eager: Callable[..., Any],
    inputs: list[Tensor],
    grads: list[Tensor],
    compiler: Callable[..., Any] | None,
    **size: Any,
) -> Case:
    return Case({way: _trained(function, inputs, grads) for way, function in _versus(ours, eager, compiler).items()}, **size)


def _attention(ops: Ops, shapes: Shapes, compiler: Callable[..., Any] | None, alibi: bool) -> Case:
    model, B, S = shapes.model, shapes.micro_batch, shapes.model.sequence_length
    A, G, D = model.heads, model.num_kv_heads, model.dim_per_head
    slopes = 2.0 ** (-8.0 * torch.arange(1, A + 1, device=shapes.device) / A) if alibi else None
    inputs, grads = [shapes.leaf(S, B, A, D), shapes.leaf(S, B, G, D), shapes.leaf(S, B, G, D)], [shapes.random(S, B, A, D)]
    scores = Scores(D**-0.5, slopes)
    ours, eager = (lambda q, k, v: ops.attention(q, k, v, scores)), (lambda q, k, v: sdpa.attention(q, k, v, scores))
    flops = 7.0 * S * S * B * A * D  # half of a square: 2 products forward, 5 backward
    case = _differentiable(ours, eager, inputs, grads, compiler, flops=flops)
    if compiler or alibi:
        return case

    def forced(backend: SDPBackend, *inputs: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return eager(*inputs)

    backends = {way: _trained(partial(forced, backend), inputs, grads) for way, backend in SDPA_BACKENDS.items()}
    return Case({**case.ways, **backends}, flops=flops)


def _norm(ops: Ops, shapes: Shapes, compiler: Callable[..., Any] | None, kind: str) -> Case:
    N, H, eps = shapes.rows, shapes.model.hidden, shapes.model.norm_eps
    ours, eager = {
        "rms_norm": (lambda x, w: ops.rms_norm(x, w, eps), lambda x, w: F.rms_norm(x, (H,), w, eps)),
        "layer_norm": (lambda x, w: ops.layer_norm(x, w, None, eps), lambda x, w: F.layer_norm(x, (H,), w, None, eps)),
    }[kind]
    return _differentiable(
        ours, eager, [shapes.leaf(N, H), shapes.leaf(H)], [shapes.random(N, H)], compiler, bytes_moved=5 * N * H * shapes.width
    )


def _add_norm(ops: Ops, shapes: Shapes, compiler: Callable[..., Any] | None) -> Case:
    N, H, eps = shapes.rows, shapes.model.hidden, shapes.model.norm_eps

    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (H,), weight, eps), total

    inputs, grads = [shapes.leaf(N, H), shapes.leaf(N, H), shapes.leaf(H)], [shapes.random(N, H), shapes.random(N, H)]
    ours = lambda x, r, w: ops.add_norm(x, r, w, None, eps, "rmsnorm")  # noqa: E731
    return _differentiable(ours, eager, inputs, grads, compiler, bytes_moved=8 * N * H * shapes.width)


def _rope(ops: Ops, shapes: Shapes, compiler: Callable[..., Any] | None) -> Case:
    S, D = shapes.model.sequence_length, shapes.model.dim_per_head
    shape, angle = (S, shapes.micro_batch, shapes.model.heads, D), torch.randn(S, D // 2, device=shapes.device)
    cos, sin = angle.cos(), angle.sin()
    wide_cos, wide_sin = (f(angle).repeat(1, 2)[:, None, None].to(shapes.dtype) for f in (torch.cos, torch.sin))

    def eager(q: Tensor) -> Tensor:
        first, second = q.chunk(2, -1)
        return q * wide_cos + torch.cat((-second, first), -1) * wide_sin

    inputs = [shapes.leaf(*shape)]
    return _differentiable(
        lambda q: ops.rope(q, cos, sin), eager, inputs, [shapes.random(*shape)], compiler, bytes_moved=4 * inputs[0].numel() * shapes.width
    )


def _swiglu(ops: Ops, shapes: Shapes, compiler: Callable[..., Any] | None) -> Case:
    N, ffn = shapes.rows, shapes.model.ffn_hidden
    inputs, grads = [shapes.leaf(N, 2, ffn)], [shapes.random(N, ffn)]
    return _differentiable(ops.swiglu, lambda y: F.silu(y[:, 0]) * y[:, 1], inputs, grads, compiler, bytes_moved=8 * N * ffn * shapes.width)


def _gelu(ops: Ops, shapes: Shapes, compiler: Callable[..., Any] | None, approximate: str) -> Case:
    N, ffn = shapes.rows, shapes.model.ffn_hidden
    ours, eager = (lambda y, b: ops.gelu(y, b, approximate == "tanh")), (lambda y, b: F.gelu(y + b, approximate=approximate))
    inputs, grads = [shapes.leaf(N, ffn), shapes.leaf(ffn)], [shapes.random(N, ffn)]
    return _differentiable(
        ours, eager, inputs, grads, compiler, bytes_moved=6 * N * ffn * shapes.width
    )  # the bias' gradient reads once more


def _cross_entropy(ops: Ops, shapes: Shapes, compiler: Callable[..., Any] | None) -> Case:
    rows, vocab, device = shapes.rows, shapes.model.vocab_size, shapes.device
    logits, targets, ones = shapes.random(rows, vocab), torch.randint(0, vocab, (rows,), device=device), torch.ones(rows, device=device)
    leaf = logits.clone().requires_grad_()

    def ours() -> None:
        stats = ops.cross_entropy_stats(logits, targets, 0)
        ops.cross_entropy_backward_(logits, targets, 0, stats[0] + stats[1].log(), ones)

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), targets)

    function = plain if compiler is None else compiler(plain)

    def eager() -> None:
        function(leaf).backward()
        leaf.grad = None

    return Case({"ours": ours, "eager": eager} if compiler is None else {"compiled": eager}, bytes_moved=3 * logits.numel() * shapes.width)


def _product(ops: Ops, shapes: Shapes, compiler: Callable[..., Any] | None, which: str) -> Case:
    rows, hidden, ffn = shapes.rows, shapes.model.hidden, shapes.model.ffn_hidden
    x, weight, grad = shapes.random(rows, hidden), shapes.random(ffn, hidden), shapes.random(rows, ffn)
    main_grad = torch.zeros(ffn, hidden, device=shapes.device)
    ways: dict[str, tuple[Run, Run]] = {
        "linear": (lambda: ops.linear(x, weight, None), lambda: F.linear(x, weight)),
        "linear_input_gradient": (lambda: ops.linear_input_gradient(grad, weight), lambda: grad @ weight),
        "weight_gradient": (lambda: ops.accumulate_weight_gradient_(main_grad, grad, x), lambda: main_grad.add_(grad.t() @ x)),
    }
    ours, eager = ways[which]
    return Case(_versus(ours, eager, compiler), flops=2.0 * rows * hidden * ffn)


def _flat_buffer(ops: Ops, shapes: Shapes, compiler: Callable[..., Any] | None, which: str) -> Case:
    count, device = 8 * shapes.model.hidden * shapes.model.ffn_hidden, shapes.device
    first, second, third, fourth = (torch.zeros(count, device=device) for _ in range(4))
    low = torch.zeros(count, dtype=shapes.dtype, device=device)
    parameter = torch.zeros(count, device=device).requires_grad_()
    parameter.grad = second
    optimizer = torch.optim.AdamW([parameter], foreach=True)
    update = AdamWUpdate(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)

    def eager_adamw() -> None:
        optimizer.step()
        low.copy_(parameter.detach())

    ways: dict[str, tuple[Run, Run, int]] = {
        "adamw": (lambda: ops.adamw_(first, second, third, fourth, low, update), eager_adamw, 28 + shapes.width),
        "sum_of_squares": (lambda: ops.sum_of_squares(second), lambda: second.double().square().sum(), 4),
        "accumulate": (lambda: ops.accumulate_(first, low), lambda: first.add_(low), 8 + shapes.width),
    }
    ours, eager, size = ways[which]
    return Case(_versus(ours, eager, compiler), bytes_moved=count * size)


CASES: dict[str, Callable[[Ops, Shapes, Callable[..., Any] | None], Case]] = {
    "attention": partial(_attention, alibi=False),
    "attention_alibi": partial(_attention, alibi=True),
    **{name: partial(_norm, kind=name) for name in ("rms_norm", "layer_norm")},
    "add_norm": _add_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "gelu": partial(_gelu, approximate="none"),
    "gelu_tanh": partial(_gelu, approximate="tanh"),
    "cross_entropy": _cross_entropy,
    **{name: partial(_product, which=name) for name in ("linear", "linear_input_gradient", "weight_gradient")},
    **{name: partial(_flat_buffer, which=name) for name in ("adamw", "sum_of_squares", "accumulate")},
}
