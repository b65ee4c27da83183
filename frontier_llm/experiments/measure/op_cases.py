"""What `bench` times: each op at the shapes of one microbatch on one rank, and the ways to compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from frontier_llm.config.model import ModelConfig
from frontier_llm.experiments.measure.products import Call, operands, product_calls
from frontier_llm.ops import Mask, Routing, sdpa, stream_key
from frontier_llm.ops.reference import AdamWUpdate, Ops, Scores

SDPA_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Case:
    """One op, ours beside eager torch; forward and backward where there are gradients of its outputs.

    A function that returns None for a differentiable op has been its own backward.
    """

    ours: Callable[..., Any]
    eager: Callable[..., Any]
    inputs: Sequence[Tensor] = ()
    grads: Sequence[Tensor] = ()
    bytes_moved: int = 0
    flops: float = 0.0
    others: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def ways(self, compiler: Callable[..., Any] | None = None) -> dict[str, Call]:
        """Each way to compute the op once; with a compiler the only one is eager torch through it."""
        ours = {"ours": self.ours, "eager": self.eager, **self.others}
        functions = ours if compiler is None else {"compiled": compiler(self.eager)}
        return {way: partial(self._once, function) for way, function in functions.items()}

    def _once(self, function: Callable[..., Any]) -> None:
        outputs = function(*self.inputs)
        if self.grads and outputs is not None:
            torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), self.grads)
        for x in self.inputs:
            x.grad = None


@dataclass(frozen=True)
class Shapes:
    """Sizes of one microbatch on one rank, and tensors of them."""

    model: ModelConfig
    micro_batch: int
    dtype: torch.dtype
    device: torch.device
    tp: int = 1

    @property
    def rows(self) -> int:
        """Tokens N = S * B."""
        return self.model.sequence_length * self.micro_batch

    @property
    def ffn(self) -> int:
        """Features of the MLP on this rank."""
        return self.model.ffn_hidden // self.tp

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def random(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def leaf(self, *shape: int) -> Tensor:
        """Normal numbers that want a gradient."""
        return self.random(*shape).requires_grad_()


def _attention(ops: Ops, shapes: Shapes, alibi: bool) -> Case:
    model = shapes.model
    B = shapes.micro_batch
    S = shapes.model.sequence_length
    A = model.heads // shapes.tp
    G = model.num_kv_heads // shapes.tp
    D = model.dim_per_head
    slopes = 2.0 ** (-8.0 * torch.arange(1, A + 1, device=shapes.device) / A) if alibi else None
    inputs = [shapes.leaf(S, B, A, D), shapes.leaf(S, B, G, D), shapes.leaf(S, B, G, D)]
    grads = [shapes.random(S, B, A, D)]
    scores = Scores(D**-0.5, slopes)
    ours, eager = (lambda q, k, v: ops.attention(q, k, v, scores)), (lambda q, k, v: sdpa.attention(q, k, v, scores))
    flops = 7.0 * S * S * B * A * D  # half of a square: 2 products forward, 5 backward

    def forced(backend: SDPBackend, *inputs: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return eager(*inputs)

    backends = {} if alibi else {way: partial(forced, backend) for way, backend in SDPA_BACKENDS.items()}
    return Case(ours, eager, inputs, grads, flops=flops, others=backends)


def _norm(ops: Ops, shapes: Shapes, kind: str) -> Case:
    N = shapes.rows
    H = shapes.model.hidden
    ours, eager = _norms(ops, shapes.model.norm_eps)[kind]
    return Case(
        ours, eager, [shapes.leaf(N, H), shapes.leaf(H)], [shapes.random(N, H)], bytes_moved=5 * N * H * shapes.width
    )


def _norms(ops: Ops, eps: float) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]:
    """By `model.norm`: ours and torch's own."""
    return {
        "rmsnorm": (lambda x, w: ops.rms_norm(x, w, eps), lambda x, w: F.rms_norm(x, w.shape, w, eps)),
        "layernorm": (
            lambda x, w: ops.layer_norm(x, w, None, eps),
            lambda x, w: F.layer_norm(x, w.shape, w, None, eps),
        ),
    }


def _add_norm(ops: Ops, shapes: Shapes) -> Case:
    N = shapes.rows
    H = shapes.model.hidden
    eps = shapes.model.norm_eps
    kind = shapes.model.norm

    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return _norms(ops, eps)[kind][1](total, weight), total

    inputs = [shapes.leaf(N, H), shapes.leaf(N, H), shapes.leaf(H)]
    grads = [shapes.random(N, H), shapes.random(N, H)]
    ours = lambda x, r, w: ops.add_norm(x, r, w, None, eps, kind)  # noqa: E731
    return Case(ours, eager, inputs, grads, bytes_moved=8 * N * H * shapes.width)


def _rope(ops: Ops, shapes: Shapes) -> Case:
    S = shapes.model.sequence_length
    D = shapes.model.dim_per_head
    shape = (S, shapes.micro_batch, shapes.model.heads // shapes.tp, D)
    angle = torch.randn(S, D // 2, device=shapes.device)
    cos = angle.cos()
    sin = angle.sin()
    wide_cos, wide_sin = (f(angle).repeat(1, 2)[:, None, None].to(shapes.dtype) for f in (torch.cos, torch.sin))

    def eager(q: Tensor) -> Tensor:
        first, second = q.chunk(2, -1)
        return q * wide_cos + torch.cat((-second, first), -1) * wide_sin

    inputs = [shapes.leaf(*shape)]
    return Case(
        lambda q: ops.rope(q, cos, sin),
        eager,
        inputs,
        [shapes.random(*shape)],
        bytes_moved=4 * inputs[0].numel() * shapes.width,
    )


def _swiglu(ops: Ops, shapes: Shapes) -> Case:
    N = shapes.rows
    ffn = shapes.ffn
    inputs = [shapes.leaf(N, 2, ffn)]
    grads = [shapes.random(N, ffn)]
    return Case(ops.swiglu, lambda y: F.silu(y[:, 0]) * y[:, 1], inputs, grads, bytes_moved=8 * N * ffn * shapes.width)


def _gelu(ops: Ops, shapes: Shapes, approximate: str) -> Case:
    N = shapes.rows
    ffn = shapes.ffn
    ours, eager = (
        (lambda y, b: ops.gelu(y, b, approximate == "tanh")),
        (lambda y, b: F.gelu(y + b, approximate=approximate)),
    )
    inputs = [shapes.leaf(N, ffn), shapes.leaf(ffn)]
    grads = [shapes.random(N, ffn)]
    bytes_moved = 6 * N * ffn * shapes.width  # the bias' gradient reads once more
    return Case(ours, eager, inputs, grads, bytes_moved=bytes_moved)


def _route(ops: Ops, shapes: Shapes) -> Case:
    """A model without experts routes to 64, 8 for each token."""
    moe = shapes.model.moe
    N = shapes.rows
    experts, top_k = (64, 8) if moe is None else (moe.experts, moe.top_k)
    logits = torch.randn(N, experts, device=shapes.device)
    grads = [torch.randn(N, size, device=shapes.device) for size in (experts, top_k)]

    def eager(logits_NE: Tensor) -> tuple[Tensor, Tensor]:
        scores_NE = logits_NE.softmax(-1)
        weights_Nk = scores_NE.gather(1, scores_NE.topk(top_k).indices)
        return scores_NE, weights_Nk / weights_Nk.sum(-1, keepdim=True)

    ours = lambda logits_NE: ops.route(logits_NE, None, Routing(top_k))[:2]  # noqa: E731
    return Case(ours, eager, [logits.requires_grad_()], grads, bytes_moved=5 * 4 * logits.numel())


def _drop(ops: Ops, shapes: Shapes) -> Case:
    """Of what is added to the residual stream, which has the same gradient."""
    B = shapes.micro_batch
    S = shapes.model.sequence_length
    H = shapes.model.hidden
    rate = 0.1
    mask = Mask(
        stream_key(0, "bench"),
        round(rate * 2**16),
        torch.arange(B, device=shapes.device),
        torch.arange(S, device=shapes.device),
    )
    grad = shapes.random(S, B, H)

    def ours(x: Tensor, residual: Tensor) -> None:
        ops.drop(x, residual, mask)
        ops.drop(grad, None, mask)

    inputs = [shapes.leaf(S, B, H), shapes.leaf(S, B, H)]
    return Case(
        ours,
        lambda x, residual: residual + F.dropout(x, rate),
        inputs,
        [grad],
        bytes_moved=5 * grad.numel() * shapes.width,
    )


def _cross_entropy(ops: Ops, shapes: Shapes) -> Case:
    rows = shapes.rows
    vocab = shapes.model.vocab_size
    device = shapes.device
    logits = shapes.random(rows, vocab)
    targets = torch.randint(0, vocab, (rows,), device=device)
    ones = torch.ones(rows, device=device)

    def ours(_: Tensor) -> None:
        stats = ops.cross_entropy_stats(logits, targets, 0)
        ops.cross_entropy_backward_(logits, targets, 0, stats[0] + stats[1].log(), ones)

    def eager(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), targets)

    leaf = logits.clone().requires_grad_()
    return Case(ours, eager, [leaf], [torch.ones((), device=device)], bytes_moved=3 * logits.numel() * shapes.width)


def _product(ops: Ops, shapes: Shapes, which: str) -> Case:
    sizes = shapes.rows, shapes.ffn, shapes.model.hidden
    ours, eager = product_calls(ops, *operands(*sizes, shapes.dtype, shapes.device))[which]
    return Case(ours, eager, flops=2.0 * math.prod(sizes))


def _flat_buffer(ops: Ops, shapes: Shapes, which: str) -> Case:
    count = 8 * shapes.model.hidden * shapes.model.ffn_hidden
    device = shapes.device
    first, second, third, fourth = (torch.zeros(count, device=device) for _ in range(4))
    low = torch.zeros(count, dtype=shapes.dtype, device=device)
    parameter = torch.zeros(count, device=device).requires_grad_()
    parameter.grad = second
    optimizer = torch.optim.AdamW([parameter], foreach=True)
    update = AdamWUpdate(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)

    def eager_adamw() -> None:
        optimizer.step()
        low.copy_(parameter.detach())

    ways: dict[str, tuple[Call, Call, int]] = {
        "adamw": (lambda: ops.adamw_(first, second, third, fourth, low, update), eager_adamw, 28 + shapes.width),
        "sum_of_squares": (lambda: ops.sum_of_squares(second), lambda: second.double().square().sum(), 4),
        "accumulate": (lambda: ops.accumulate_(first, low), lambda: first.add_(low), 8 + shapes.width),
    }
    ours, eager, size = ways[which]
    return Case(ours, eager, bytes_moved=count * size)


CASES: dict[str, Callable[[Ops, Shapes], Case]] = {
    "attention": partial(_attention, alibi=False),
    "attention_alibi": partial(_attention, alibi=True),
    "rms_norm": partial(_norm, kind="rmsnorm"),
    "layer_norm": partial(_norm, kind="layernorm"),
    "add_norm": _add_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "gelu": partial(_gelu, approximate="none"),
    "gelu_tanh": partial(_gelu, approximate="tanh"),
    "route": _route,
    "drop": _drop,
    "cross_entropy": _cross_entropy,
    **{name: partial(_product, which=name) for name in ("linear", "linear_input_gradient", "weight_gradient")},
    **{name: partial(_flat_buffer, which=name) for name in ("adamw", "sum_of_squares", "accumulate")},
}
