"""Connects a back-end's forward and backward functions to autograd, for the C++ ops and for the prebuilt GPU kernels.

A back-end derives from `DifferentiableOps` and implements the abstract methods. The abstract methods are called without
an autograd graph and must not use autograd.
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
    """Tensors that attention saves for its backward. `model/dims.py` explains the letters of the shapes.

    The tensors have the layout and the type that the kernels read, so that backward need not copy or convert again.
    """

    q: Tensor  # [S, B, a, D]
    k: Tensor  # [S, B, g, D]
    v: Tensor  # [S, B, g, D]
    o: Tensor  # [S, B, a, D]
    logsumexp: Tensor  # [B, a, S, or S padded to complete blocks]
    slopes: Tensor | None  # [a]
    documents: Tensor | None  # [B, S, or S padded to complete blocks]
    key_documents: Tensor | None = None  # [B, K]; None = the documents of the queries


class NormKind(NamedTuple):
    """RMSNorm, or LayerNorm if `centred`."""

    centred: bool
    eps: float


class Normed(NamedTuple):
    """Tensors that a norm saves for its backward. The weight has the input's type."""

    total: Tensor  # the input, or input + residual if there was a residual
    weight: Tensor
    mean: Tensor  # one number per row; empty unless the norm is centred
    scale: Tensor  # one number per row: 1 / sqrt(variance + eps)
    kind: NormKind
    has_bias: bool


class DifferentiableOps(ABC):
    """The differentiable ops, built from a back-end's forward and backward functions.

    Shapes and meaning are the same as in `ops.reference`.
    """

    def attention(self, q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
        """Return causal attention. It saves each row's log-sum-exp, not the scores."""
        return _Attention.apply(q_SBaD, k_SBgD, v_SBgD, scores, self)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return RMSNorm over the last dim."""
        return _Norm.apply(x, None, weight, None, NormKind(False, eps), self)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return LayerNorm over the last dim."""
        return _Norm.apply(x, None, weight, bias, NormKind(True, eps), self)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str
    ) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), computed in one pass."""
        centred = kind == "layernorm"
        return _Norm.apply(x, residual, weight, bias if centred else None, NormKind(centred, eps), self)

    def rope(self, x_SBaD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """Return `x` with the rotary position embedding applied (rotate-half).

        The backward rotates the gradient by the negative angles.
        """
        return _Rope.apply(x_SBaD, cos_SR, sin_SR, self)

    def rotated_heads(self, qkv_SBgqD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys, and values. The backward writes the projection's gradient once."""
        return _Heads.apply(qkv_SBgqD, cos_SR, sin_SR, self)

    def swiglu(self, x_2f: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return silu(gate) * up. It saves only its inputs."""
        return _Swiglu.apply(x_2f, weights, self)

    def gelu(self, x: Tensor, bias: Tensor | None, approximate: bool, weights: Tensor | None = None) -> Tensor:
        """Return GELU of x + bias. It saves x and bias, not their sum."""
        return _Gelu.apply(x, bias, approximate, weights, self)

    def route(self, logits_NE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, weights and experts, computed in one pass. It saves the scores and the chosen experts."""
        return _Route.apply(logits_NE, None if bias_E is None else bias_E.detach(), routing, self)

    @abstractmethod
    def attention_forward(self, q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Attended:
        """Return the output and the other tensors that the backward needs."""

    @abstractmethod
    def attention_backward(self, grad_o: Tensor, saved: Attended, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. Slopes and documents come from `saved`, not from `scores`."""

    @abstractmethod
    def norm_forward(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, kind: NormKind
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the output, and total, mean and scale of `Normed`.

        Weight and bias have x's type and are contiguous.
        """

    @abstractmethod
    def norm_backward(
        self, grad: Tensor, grad_total: Tensor | None, saved: Normed
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradient of the total, and fp32 rows (R, H) for the weight and for the bias.

        The sum of the rows is the parameter's gradient. If the norm has no bias, the rows of the bias are ignored.
        """

    @abstractmethod
    def rotate(self, x_SBaD: Tensor, cos_SR: Tensor, sin_SR: Tensor, sign: float) -> Tensor:
        """Return `reference.rope` with the angles times `sign`."""

    def split_heads(self, qkv_SBgqD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys, and values, as `reference.rotated_heads`."""
        q_SBaD = qkv_SBgqD[:, :, :, :-2].flatten(2, 3)
        k_SBgD = qkv_SBgqD[:, :, :, -2]
        return (
            self.rotate(q_SBaD, cos_SR, sin_SR, 1.0),
            self.rotate(k_SBgD, cos_SR, sin_SR, 1.0),
            qkv_SBgqD[:, :, :, -1].contiguous(),
        )

    def join_heads(self, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """Return the projection's gradient from the gradients of the results of `split_heads`."""
        grad_q_SBgqD = self.rotate(grad_q, cos_SR, sin_SR, -1.0).unflatten(2, (grad_k.shape[2], -1))
        return torch.cat(
            (grad_q_SBgqD, self.rotate(grad_k, cos_SR, sin_SR, -1.0)[:, :, :, None], grad_v[:, :, :, None]), dim=-2
        )

    @abstractmethod
    def swiglu_forward(self, x_2f: Tensor, weights: Tensor | None) -> Tensor:
        """Return silu(gate) * up, times each row's weight."""

    @abstractmethod
    def swiglu_backward(self, grad: Tensor, x_2f: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and, in fp32, of the weights. If `weights` is None, its gradient is ignored."""

    @abstractmethod
    def gelu_forward(self, x: Tensor, bias: Tensor | None, approximate: bool, weights: Tensor | None) -> Tensor:
        """Return GELU of x + bias, times each row's weight. The bias has x's type and is contiguous."""

    @abstractmethod
    def gelu_backward(
        self, grad: Tensor, x: Tensor, bias: Tensor | None, approximate: bool, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of x, and in fp32 rows (R, F) for the bias and the gradient of the weights.

        The sum of the rows is the gradient of the bias. If `bias` or `weights` is None, its result is ignored.
        """

    @abstractmethod
    def route_forward(
        self, logits_NE: Tensor, bias_E: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, weights and experts, as `reference.route`."""

    @abstractmethod
    def route_backward(
        self, grad_scores_NE: Tensor, grad_weights_Nk: Tensor, scores_NE: Tensor, experts_Nk: Tensor, routing: Routing
    ) -> Tensor:
        """Return the gradient of the logits."""


def sum_of_rows(rows_RC: Tensor) -> Tensor:
    """Return the sum of the rows. A single row is not copied."""
    return rows_RC[0] if len(rows_RC) == 1 else rows_RC.sum(0)


def _taker_of_rows(parameter: Tensor | None) -> Any:
    """Return the parameter if it adds rows to its gradient itself (`ShardedParameter.take_gradient_rows`), or None.

    Backward does not look at the saved tensor, because recomputation replaces it by a tensor without attributes.
    """
    return None if getattr(parameter, "take_gradient_rows", None) is None else parameter


def _gradient(taker: Any, rows_RC: Tensor) -> Tensor | None:
    """Return the sum of the rows. If `taker` is given, pass the rows to it instead: the sum then needs no separate
    launch.
    """
    if taker is None:
        return sum_of_rows(rows_RC)
    taker.take_gradient_rows(taker, rows_RC)
    return None


def rows_in_order(logits_Nv: Tensor) -> Tensor:
    """Return the logits without a graph, with contiguous rows. They are copied only if a row is not contiguous."""
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
        ctx.takes_weight_rows = _taker_of_rows(weight)
        ctx.takes_bias_rows = _taker_of_rows(bias)
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
        grad_x, weight_rows, bias_rows = ctx.ops.norm_backward(grad_outputs[0], grad_total, saved)
        grad_residual = grad_x if ctx.has_residual else None
        grad_weight = _gradient(ctx.takes_weight_rows, weight_rows)
        grad_bias = _gradient(ctx.takes_bias_rows, bias_rows) if bias_rows is not None and ctx.has_bias else None
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
        ctx.takes_bias_rows = _taker_of_rows(bias)
        ctx.approximate = approximate
        ctx.ops = ops
        return ops.gelu_forward(x, None if bias is None else _of_type(bias, x), approximate, weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, weights = ctx.saved_tensors
        bias_of_type = None if bias is None else _of_type(bias, x)
        grad_x, bias_rows, grad_weights = ctx.ops.gelu_backward(
            grad_outputs[0], x, bias_of_type, ctx.approximate, weights
        )
        grad_bias = None if bias is None else _gradient(ctx.takes_bias_rows, bias_rows)
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
