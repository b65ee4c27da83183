"""Benchmark cases for single ops: each op of the catalogue and its eager torch equivalent, at the shapes of a model.

The cases have the shapes of one microbatch on one rank; those of the optimizer use a flat buffer. `bench
step` and `calibrate` use the matrix products of a layer and of the head from here.
"""

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

from frontier_llm.blueprint.items import Phase, Product, Software
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.work import block_work, head_work
from frontier_llm.config import ModelConfig
from frontier_llm.ops import Routing, sdpa
from frontier_llm.ops import cases as catalogue
from frontier_llm.ops.reference import Ops, Scores

Call = Callable[[], Any]

SDPA_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def gemm_shapes(model: ModelConfig, tokens: int, tp: int) -> list[tuple[str, int, int, int, int]]:
    """Return (name, M, N, K, count per microbatch) of the forward matrix products on one tensor-parallel rank.

    The backward products have twice the FLOPs. Products of experts are not included (`grouped_shapes`).
    """
    layout = Layout(tp=tp, micro_batch=tokens // model.sequence_length)
    software = Software()
    return [
        (one.parameter.removeprefix("layers.0.").removesuffix(".weight"), one.m, one.n, one.k, count)
        for items, count in (
            (block_work(model, layout, software), model.layers),
            (head_work(model, layout, software), 1),
        )
        for one in (item.work for item in items if item.phase is Phase.F)
        if isinstance(one, Product) and one.parameter and not one.grouped
    ]


def grouped_shapes(model: ModelConfig, tokens: int, tp: int) -> list[tuple[int, int, int, int]]:
    """Return (rows per expert, N, K, experts) of the experts' forward products on one rank, with even routing.

    The rank holds all experts. Empty for a model without experts.
    """
    layout = Layout(tp=tp, micro_batch=tokens // model.sequence_length)
    work = (item.work for item in block_work(model, layout, Software()) if item.phase is Phase.F)
    return [(one.m, one.n, one.k, one.batch) for one in work if isinstance(one, Product) and one.grouped]


def grouped_calls(
    ops: Ops, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> list[tuple[tuple[int, int, int, int], Call]]:
    """Return ((M, N, K, experts), call) of a grouped product and its two gradients, on random numbers.

    The weight gradient is added to an fp32 buffer.
    """
    M, N, K, experts = shape
    x, _, g_MN = operands(M * experts, N, K, dtype, device)
    w_ENK = torch.randn(experts, N, K, dtype=dtype, device=device)
    total_ENK = torch.zeros(w_ENK.shape, device=device)
    ends_E = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * M
    return [
        ((M, N, K, experts), lambda: ops.grouped_linear(x, w_ENK, ends_E)),
        ((M, K, N, experts), lambda: ops.grouped_input_gradient(g_MN, w_ENK, ends_E)),
        ((N, K, M, experts), lambda: ops.accumulate_grouped_gradient_(total_ENK, g_MN, x, ends_E)),
    ]


def product_calls(ops: Ops, x_MK: Tensor, w_NK: Tensor, g_MN: Tensor) -> dict[str, tuple[Call, Call]]:
    """Return name → (this project's call, torch's call) for a matrix product and its two gradients.

    The weight gradient is added to an fp32 buffer.
    """
    total_NK = torch.zeros(w_NK.shape, device=w_NK.device)
    return {
        "linear": (lambda: ops.linear(x_MK, w_NK, None), lambda: x_MK @ w_NK.T),
        "linear_input_gradient": (lambda: ops.linear_input_gradient(g_MN, w_NK), lambda: g_MN @ w_NK),
        "weight_gradient": (
            lambda: ops.accumulate_weight_gradient_(total_NK, g_MN, x_MK),
            lambda: total_NK.add_(g_MN.T @ x_MK),
        ),
    }


def operands(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return random input (M, K), weight (N, K) and output gradient (M, N) of a product."""
    x, w, g = (torch.randn(shape, dtype=dtype, device=device) for shape in ((M, K), (N, K), (M, N)))
    return x, w, g


@dataclass(frozen=True)
class Timed:
    """One op of this project and its eager torch equivalent.

    If `grads` has gradients of the outputs, the backward pass is timed too. A function that returns None has already
    run its own backward pass.
    """

    ours: Callable[..., Any]
    eager: Callable[..., Any]
    inputs: Sequence[Tensor | None] = ()
    grads: Sequence[Tensor] = ()
    bytes_moved: int = 0
    flops: float = 0.0
    others: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def ways(self, compiler: Callable[..., Any] | None = None) -> dict[str, Call]:
        """Return implementation → call. With a compiler, the only implementation is the torch code of the op,
        compiled.
        """
        ours = {"ours": self.ours, "eager": self.eager, **self.others}
        functions = ours if compiler is None else {"compiled": compiler(self.eager)}
        return {way: partial(self._once, function) for way, function in functions.items()}

    def _once(self, function: Callable[..., Any]) -> None:
        outputs = function(*self.inputs)
        if self.grads and outputs is not None:
            torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), self.grads)
        for x in self.inputs:
            if x is not None:
                x.grad = None


@dataclass(frozen=True)
class Shapes:
    """Sizes of one microbatch on one rank."""

    model: ModelConfig
    micro_batch: int
    dtype: torch.dtype
    device: torch.device
    tp: int = 1

    @property
    def rows(self) -> int:
        """Number of tokens N = S * B."""
        return self.model.sequence_length * self.micro_batch

    @property
    def ffn(self) -> int:
        """Width of the MLP on this rank."""
        return self.model.ffn_hidden // self.tp

    @property
    def width(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    @property
    def flat(self) -> int:
        """Elements of a flat optimizer buffer."""
        return 8 * self.model.hidden * self.model.ffn_hidden


def _timed(
    ops: Ops,
    case: catalogue.Case,
    eager: Callable[..., Any],
    *,
    bytes_moved: int = 0,
    flops: float = 0.0,
    others: Mapping[str, Callable[..., Any]] | None = None,
    outputs: Sequence[tuple[int, ...]] = (),
) -> Timed:
    """Return a differentiable case of the catalogue with its eager torch equivalent.

    `outputs` are the shapes of the outputs, by default the first input's shape.
    """
    inputs = [None if x is None else x.requires_grad_() for x in case.inputs]
    assert inputs[0] is not None
    grads = [torch.randn(*shape, dtype=inputs[0].dtype) for shape in outputs or [tuple(inputs[0].shape)]]
    return Timed(
        ours=partial(case.call, ops),
        eager=eager,
        inputs=inputs,
        grads=grads,
        bytes_moved=bytes_moved,
        flops=flops,
        others=others or {},
    )


def _attention(ops: Ops, shapes: Shapes, alibi: bool) -> Timed:
    model = shapes.model
    B = shapes.micro_batch
    S = shapes.model.sequence_length
    A = model.heads // shapes.tp
    G = model.num_kv_heads // shapes.tp
    D = model.dim_per_head
    slopes = 2.0 ** (-8.0 * torch.arange(1, A + 1) / A) if alibi else None
    scores = Scores(D**-0.5, slopes)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa.attention(q, k, v, scores)

    def forced(backend: SDPBackend, *inputs: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return eager(*inputs)

    return _timed(
        ops,
        catalogue.attention(shapes.dtype, sequence=S, batch=B, heads=A, kv_heads=G, head_dim=D, scores=scores),
        eager,
        flops=7.0 * S * S * B * A * D,  # 2 products forward and 5 backward, over the half of S x S that is not masked
        others={} if alibi else {way: partial(forced, backend) for way, backend in SDPA_BACKENDS.items()},
    )


def _norm(ops: Ops, shapes: Shapes, kind: str) -> Timed:
    N = shapes.rows
    H = shapes.model.hidden
    eps = shapes.model.norm_eps
    if kind == "rmsnorm":
        case = catalogue.rms_norm(shapes.dtype, N, H, eps=eps)
    else:
        case = catalogue.layer_norm(shapes.dtype, N, H, eps=eps, bias=False)
    return _timed(
        ops, case, lambda x, weight, *_: _eager_norm(kind, x, weight, eps), bytes_moved=5 * N * H * shapes.width
    )


def _eager_norm(kind: str, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply torch's norm of the kind `kind` (a value of `model.norm`)."""
    if kind == "rmsnorm":
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, None, eps)


def _add_norm(ops: Ops, shapes: Shapes) -> Timed:
    N = shapes.rows
    H = shapes.model.hidden
    eps = shapes.model.norm_eps
    kind = shapes.model.norm

    def eager(x: Tensor, residual: Tensor, weight: Tensor, _bias: None) -> tuple[Tensor, Tensor]:
        total = x + residual
        return _eager_norm(kind, total, weight, eps), total

    case = catalogue.add_norm(shapes.dtype, N, H, kind=kind, eps=eps)
    return _timed(ops, case, eager, bytes_moved=8 * N * H * shapes.width, outputs=[(N, H), (N, H)])


def _rope(ops: Ops, shapes: Shapes) -> Timed:
    S = shapes.model.sequence_length
    D = shapes.model.dim_per_head
    shape = (S, shapes.micro_batch, shapes.model.heads // shapes.tp, D)
    half = D // 2
    cos, sin = (x.repeat(1, 2)[:, None, None].to(shapes.dtype) for x in catalogue.rotations(*shape, half=half))

    def eager(q: Tensor) -> Tensor:
        first, second = q.chunk(2, -1)
        return q * cos + torch.cat((-second, first), -1) * sin

    case = catalogue.rope(shapes.dtype, *shape, half=half)
    return _timed(ops, case, eager, bytes_moved=4 * math.prod(shape) * shapes.width)


def _swiglu(ops: Ops, shapes: Shapes) -> Timed:
    case = catalogue.swiglu(shapes.dtype, shapes.rows, 2, shapes.ffn)
    bytes_moved = 8 * shapes.rows * shapes.ffn * shapes.width
    eager = lambda y: F.silu(y[:, 0]) * y[:, 1]  # noqa: E731
    return _timed(ops, case, eager, bytes_moved=bytes_moved, outputs=[(shapes.rows, shapes.ffn)])


def _gelu(ops: Ops, shapes: Shapes, approximate: str) -> Timed:
    case = catalogue.gelu(shapes.dtype, shapes.rows, shapes.ffn, approximate=approximate == "tanh")
    # 2 passes forward, 3 backward, and one more read for the gradient of the bias
    bytes_moved = 6 * shapes.rows * shapes.ffn * shapes.width
    return _timed(ops, case, lambda y, bias: F.gelu(y + bias, approximate=approximate), bytes_moved=bytes_moved)


def _route(ops: Ops, shapes: Shapes) -> Timed:
    """Return the case of the router. A model without experts uses 64 experts, 8 for each token."""
    moe = shapes.model.moe
    experts, top_k = (64, 8) if moe is None else (moe.experts, moe.top_k)
    (logits,) = catalogue.route(experts, Routing(top_k), tokens=shapes.rows).inputs
    assert logits is not None
    grads = [torch.randn(shapes.rows, size) for size in (experts, top_k)]

    def eager(logits_NE: Tensor) -> tuple[Tensor, Tensor]:
        scores_NE = logits_NE.softmax(-1)
        weights_Nk = scores_NE.gather(1, scores_NE.topk(top_k).indices)
        return scores_NE, weights_Nk / weights_Nk.sum(-1, keepdim=True)

    def ours(logits_NE: Tensor) -> Any:
        return ops.route(logits_NE, None, Routing(top_k))[:2]

    return Timed(ours, eager, [logits.requires_grad_()], grads, bytes_moved=5 * 4 * logits.numel())


def _drop(ops: Ops, shapes: Shapes) -> Timed:
    """Return the case of dropout with residual. The backward pass is the same op on the gradient.

    The gradient of the residual input equals the gradient of the output, so it needs no work.
    """
    shape = (shapes.model.sequence_length, shapes.micro_batch, shapes.model.hidden)
    case = catalogue.drop(shapes.dtype, *shape)
    grad = torch.randn(*shape, dtype=shapes.dtype)

    def ours(x: Tensor, residual: Tensor) -> None:
        case.call(ops, x.detach(), residual.detach())
        case.call(ops, grad, None)

    inputs = [None if x is None else x.requires_grad_() for x in case.inputs]
    eager = lambda x, residual: residual + F.dropout(x, 0.25)  # noqa: E731
    return Timed(ours, eager, inputs, [grad], bytes_moved=5 * grad.numel() * shapes.width)


def _cross_entropy(ops: Ops, shapes: Shapes) -> Timed:
    vocabulary = shapes.model.vocab_size
    targets = torch.randint(0, vocabulary, (shapes.rows,))
    case = catalogue.cross_entropy(shapes.dtype, vocabulary, targets=targets, first=0)
    (logits,) = case.inputs
    assert logits is not None
    overwritten = logits.clone()

    def ours(_: Tensor) -> None:
        case.call(ops, overwritten)

    def eager(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), targets)

    bytes_moved = 3 * logits.numel() * shapes.width
    return Timed(ours, eager, [logits.requires_grad_()], [torch.ones(())], bytes_moved=bytes_moved)


def _product(ops: Ops, shapes: Shapes, which: str) -> Timed:
    sizes = shapes.rows, shapes.ffn, shapes.model.hidden
    ours, eager = product_calls(ops, *operands(*sizes, shapes.dtype, shapes.device))[which]
    return Timed(ours, eager, flops=2.0 * math.prod(sizes))


def _adamw(ops: Ops, shapes: Shapes) -> Timed:
    case = catalogue.adamw(shapes.dtype, shapes.flat)
    master, gradient, _, _, weights = case.inputs
    assert master is not None and gradient is not None and weights is not None
    parameter = master.clone().requires_grad_()
    parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter], foreach=True)

    def eager() -> None:
        optimizer.step()
        weights.copy_(parameter.detach())

    return Timed(lambda: case.call(ops, *case.inputs), eager, bytes_moved=shapes.flat * (28 + shapes.width))


def _sum_of_squares(ops: Ops, shapes: Shapes) -> Timed:
    case = catalogue.sum_of_squares(torch.float32, shapes.flat)
    (gradient,) = case.inputs
    assert gradient is not None
    return Timed(
        lambda: case.call(ops, gradient), lambda: gradient.double().square().sum(), bytes_moved=4 * shapes.flat
    )


def _accumulate(ops: Ops, shapes: Shapes) -> Timed:
    case = catalogue.accumulate(shapes.dtype, shapes.flat)
    main, gradient = case.inputs
    assert main is not None and gradient is not None
    bytes_moved = shapes.flat * (8 + shapes.width)
    return Timed(lambda: case.call(ops, main, gradient), lambda: main.add_(gradient), bytes_moved=bytes_moved)


def _build(make: Callable[..., Timed], ops: Ops, shapes: Shapes, **more: Any) -> Timed:
    """Return a case whose tensors are on the shapes' device."""
    with shapes.device:
        return make(ops, shapes, **more)


CASES: dict[str, Callable[[Ops, Shapes], Timed]] = {
    "attention": partial(_build, _attention, alibi=False),
    "attention_alibi": partial(_build, _attention, alibi=True),
    "rms_norm": partial(_build, _norm, kind="rmsnorm"),
    "layer_norm": partial(_build, _norm, kind="layernorm"),
    "add_norm": partial(_build, _add_norm),
    "rope": partial(_build, _rope),
    "swiglu": partial(_build, _swiglu),
    "gelu": partial(_build, _gelu, approximate="none"),
    "gelu_tanh": partial(_build, _gelu, approximate="tanh"),
    "route": partial(_build, _route),
    "drop": partial(_build, _drop),
    "cross_entropy": partial(_build, _cross_entropy),
    "linear": partial(_build, _product, which="linear"),
    "linear_input_gradient": partial(_build, _product, which="linear_input_gradient"),
    "weight_gradient": partial(_build, _product, which="weight_gradient"),
    "adamw": partial(_build, _adamw),
    "sum_of_squares": partial(_build, _sum_of_squares),
    "accumulate": partial(_build, _accumulate),
}
