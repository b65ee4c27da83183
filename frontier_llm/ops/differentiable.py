"""Autograd around a back-end's forward and backward calls: written once for the C++ ops of the CPU and the prebuilt
kernels of the GPU.

A back-end derives from `DifferentiableOps` and gives the plain calls. None of them may know autograd, and all are
called without a graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from frontier_llm.ops.reference import Scores
from frontier_llm.ops.routing import Routing


class Attended(NamedTuple):
    """What attention keeps for its backward: everything as the kernels read it, so that no copy or conversion is
    made twice.
    """

    q: Tensor  # [S, B, a, D]
    k: Tensor  # [S, B, g, D], as v
    v: Tensor
    o: Tensor  # as q
    logsumexp: Tensor  # [B, a, S or more]
    slopes: Tensor | None  # [a]
    documents: Tensor | None  # [B, S or more]
    key_documents: Tensor | None = None  # [B, K]; None = those of the queries


class NormKind(NamedTuple):
    """RMSNorm, or (centred) LayerNorm."""

    centred: bool
    eps: float


class Normed(NamedTuple):
    """What a norm keeps for its backward; the weight is of the input's type."""

    total: Tensor  # the input, with the residual if there was one
    weight: Tensor
    mean: Tensor  # one per row; empty unless centred
    scale: Tensor  # one per row: 1 / sqrt(variance + eps)
    kind: NormKind
    has_bias: bool


class DifferentiableOps(ABC):
    """The face's differentiable ops over the calls that a back-end gives. Shapes and meaning are those of
    `ops.reference`.
    """

    def attention(self, q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
        """Causal attention; saves the logarithm of each row's sum, not the scores."""
        return _Attention.apply(q_SBaD, k_SBgD, v_SBgD, scores, self)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dim."""
        return _Norm.apply(x, None, weight, None, NormKind(False, eps), self)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """LayerNorm over the last dim."""
        return _Norm.apply(x, None, weight, bias, NormKind(True, eps), self)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str
    ) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual) in one pass."""
        centred = kind == "layernorm"
        return _Norm.apply(x, residual, weight, bias if centred else None, NormKind(centred, eps), self)

    def rope(self, x_SBaD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """Rotate-half embedding; the backward turns the gradient back by the same angles."""
        return _Rope.apply(x_SBaD, cos_SR, sin_SR, self)

    def rotated_heads(self, qkv_SBgqD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys turned, and values; the backward writes the projection's gradient once."""
        return _Heads.apply(qkv_SBgqD, cos_SR, sin_SR, self)

    def swiglu(self, x_2f: Tensor, weights: Tensor | None = None) -> Tensor:
        """silu(gate) * up; saves its inputs alone."""
        return _Swiglu.apply(x_2f, weights, self)

    def gelu(self, x: Tensor, bias: Tensor | None, approximate: bool, weights: Tensor | None = None) -> Tensor:
        """GELU of x + bias; saves x and bias, not their sum."""
        return _Gelu.apply(x, bias, approximate, weights, self)

    def route(self, logits_NE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, weights and experts in one pass; saves the scores and who was chosen."""
        return _Route.apply(logits_NE, None if bias_E is None else bias_E.detach(), routing, self)

    @abstractmethod
    def attention_forward(self, q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Attended:
        """The output, and what the backward needs."""

    @abstractmethod
    def attention_backward(self, grad_o: Tensor, saved: Attended, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v. Of `scores` only what is no tensor counts: those are in `saved`."""

    @abstractmethod
    def norm_forward(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, kind: NormKind
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output, and `Normed`'s total, mean and scale. Weight and bias are of x's type and contiguous."""

    @abstractmethod
    def norm_backward(
        self, grad: Tensor, grad_total: Tensor | None, saved: Normed
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of the total, and in fp32 of the weight and of the bias (of no meaning without one)."""

    @abstractmethod
    def rotate(self, x_SBaD: Tensor, cos_SR: Tensor, sin_SR: Tensor, sign: float) -> Tensor:
        """rope by sign times the angles."""

    def split_heads(self, qkv_SBgqD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.rotated_heads`."""
        q_SBaD = qkv_SBgqD[:, :, :, :-2].flatten(2, 3)
        k_SBgD = qkv_SBgqD[:, :, :, -2]
        return (
            self.rotate(q_SBaD, cos_SR, sin_SR, 1.0),
            self.rotate(k_SBgD, cos_SR, sin_SR, 1.0),
            qkv_SBgqD[:, :, :, -1].contiguous(),
        )

    def join_heads(self, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """The gradient of the projection."""
        grad_q_SBgqD = self.rotate(grad_q, cos_SR, sin_SR, -1.0).unflatten(2, (grad_k.shape[2], -1))
        return torch.cat(
            (grad_q_SBgqD, self.rotate(grad_k, cos_SR, sin_SR, -1.0)[:, :, :, None], grad_v[:, :, :, None]), dim=-2
        )

    @abstractmethod
    def swiglu_forward(self, x_2f: Tensor, weights: Tensor | None) -> Tensor:
        """silu(gate) * up, times each row's weight."""

    @abstractmethod
    def swiglu_backward(self, grad: Tensor, x_2f: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gradients of x, and in fp32 of the weights (of no meaning without them)."""

    @abstractmethod
    def gelu_forward(self, x: Tensor, bias: Tensor | None, approximate: bool, weights: Tensor | None) -> Tensor:
        """GELU of x + bias, which is of x's type and contiguous, times each row's weight."""

    @abstractmethod
    def gelu_backward(
        self, grad: Tensor, x: Tensor, bias: Tensor | None, approximate: bool, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, and in fp32 of the bias and the weights (of no meaning without them)."""

    @abstractmethod
    def route_forward(
        self, logits_NE: Tensor, bias_E: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.route`."""

    @abstractmethod
    def route_backward(
        self, grad_scores_NE: Tensor, grad_weights_Nk: Tensor, scores_NE: Tensor, experts_Nk: Tensor, routing: Routing
    ) -> Tensor:
        """The logits' gradient."""


def rows_in_order(logits_Nv: Tensor) -> Tensor:
    """The logits without a graph, in their own memory unless the numbers of a row lie apart."""
    logits_Nv = logits_Nv.detach()
    return logits_Nv if logits_Nv.stride(1) == 1 or logits_Nv.shape[1] == 1 else logits_Nv.contiguous()


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scores: Scores, ops: DifferentiableOps) -> Tensor:
        saved = ops.attention_forward(q, k, v, scores)
        ctx.save_for_backward(*saved)
        ctx.scores = replace(scores, alibi_slopes_a=None, documents_BS=None, key_documents_BK=None)
        ctx.ops = ops
        return saved.o

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = Attended(*ctx.saved_tensors)
        grad_q, grad_k, grad_v = ctx.ops.attention_backward(grad_outputs[0], saved, ctx.scores)
        return grad_q, grad_k, grad_v, None, None


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        kind: NormKind,
        ops: DifferentiableOps,
    ) -> Any:
        bias_of_type = None if bias is None else _of_type(bias, x)
        out, total, mean, scale = ops.norm_forward(x, residual, _of_type(weight, x), bias_of_type, kind)
        ctx.save_for_backward(total, weight, mean, scale)
        ctx.kind = kind
        ctx.ops = ops
        ctx.has_residual = residual is not None
        ctx.has_bias = bias is not None
        return (out, total) if residual is not None else out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, mean, scale = ctx.saved_tensors
        saved = Normed(total, _of_type(weight, total), mean, scale, ctx.kind, ctx.has_bias)
        grad_total = grad_outputs[1] if ctx.has_residual else None
        grad_x, grad_weight, grad_bias = ctx.ops.norm_backward(grad_outputs[0], grad_total, saved)
        grad_residual = grad_x if ctx.has_residual else None
        if not ctx.has_bias:
            grad_bias = None
        return grad_x, grad_residual, grad_weight, grad_bias, None, None


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x_SBaD: Tensor, cos_SR: Tensor, sin_SR: Tensor, ops: DifferentiableOps) -> Tensor:
        ctx.save_for_backward(cos_SR, sin_SR)
        ctx.ops = ops
        return ops.rotate(x_SBaD, cos_SR, sin_SR, 1.0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ops.rotate(grad_outputs[0], *ctx.saved_tensors, -1.0), None, None, None


class _Heads(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_SBgqD: Tensor, cos_SR: Tensor, sin_SR: Tensor, ops: DifferentiableOps
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos_SR, sin_SR)
        ctx.ops = ops
        return ops.split_heads(qkv_SBgqD, cos_SR, sin_SR)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ops.join_heads(*grad_outputs, *ctx.saved_tensors), None, None, None


class _Swiglu(Function):
    @staticmethod
    def forward(ctx: Any, x_2f: Tensor, weights: Tensor | None, ops: DifferentiableOps) -> Tensor:
        ctx.save_for_backward(x_2f, weights)
        ctx.ops = ops
        return ops.swiglu_forward(x_2f, weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_2f, weights = ctx.saved_tensors
        grad_x, grad_weights = ctx.ops.swiglu_backward(grad_outputs[0], x_2f, weights)
        return grad_x, _of_rows(grad_weights, weights), None


class _Gelu(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, approximate: bool, weights: Tensor | None, ops: DifferentiableOps
    ) -> Tensor:
        ctx.save_for_backward(x, bias, weights)
        ctx.approximate = approximate
        ctx.ops = ops
        return ops.gelu_forward(x, None if bias is None else _of_type(bias, x), approximate, weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, weights = ctx.saved_tensors
        bias_of_type = None if bias is None else _of_type(bias, x)
        grad_x, grad_bias, grad_weights = ctx.ops.gelu_backward(
            grad_outputs[0], x, bias_of_type, ctx.approximate, weights
        )
        if bias is None:
            grad_bias = None
        return grad_x, grad_bias, None, _of_rows(grad_weights, weights), None


class _Route(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NE: Tensor, bias_E: Tensor | None, routing: Routing, ops: DifferentiableOps
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores_NE, weights_Nk, experts_Nk = ops.route_forward(logits_NE.contiguous(), bias_E, routing)
        ctx.save_for_backward(scores_NE, experts_Nk)
        ctx.mark_non_differentiable(experts_Nk)
        ctx.routing = routing
        ctx.ops = ops
        return scores_NE, weights_Nk, experts_Nk

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_scores_NE, grad_weights_Nk = (grad.contiguous() for grad in grad_outputs[:2])
        return (
            ctx.ops.route_backward(grad_scores_NE, grad_weights_Nk, *ctx.saved_tensors, ctx.routing),
            None,
            None,
            None,
        )


def _of_rows(grad_weights: Tensor, weights: Tensor | None) -> Tensor | None:
    return None if weights is None else grad_weights.view(weights.shape)


def _of_type(parameter: Tensor, x: Tensor) -> Tensor:
    return parameter.to(x.dtype).contiguous()
