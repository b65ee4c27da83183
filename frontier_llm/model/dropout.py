"""Dropout on tensors that are added to the residual stream. The masks do not depend on the parallel layout."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd import Function

from frontier_llm.config import ModelConfig
from frontier_llm.ops import Mask, Ops, stream_key
from frontier_llm.parallel.tensor import LayerContext


class Drawn(NamedTuple):
    """Sample numbers and positions of this rank's tokens, which determine the dropout masks of a microbatch."""

    samples_B: Tensor
    positions_S: Tensor


class Dropout(nn.Module):
    """Computes residual + dropout(x). In evaluation no feature of x is dropped.

    Backward computes the mask again, so the mask is not saved.
    """

    def __init__(self, model: ModelConfig, context: LayerContext, name: str) -> None:
        super().__init__()
        self.ops = context.ops
        self.key = stream_key(context.seed, f"{name}.dropout")
        self.threshold = round(model.dropout * 2**16)

    def forward(self, x_SBH: Tensor, residual_SBH: Tensor | None, drawn: Drawn) -> Tensor:
        """Return residual + dropped x, (S or s, B, H), or the dropped x if there is no residual."""
        return _Drop.apply(x_SBH, residual_SBH, Mask(self.key, self.threshold, *drawn), self.ops)


class _Drop(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, mask: Mask, ops: Ops) -> Tensor:
        ctx.has_residual = residual is not None
        ctx.mask = mask
        ctx.ops = ops
        return ops.drop(x, residual, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        residual_gradient = grads[0] if ctx.has_residual else None
        return ctx.ops.drop(grads[0], None, ctx.mask), residual_gradient, None, None
