"""RMSNorm over all heads, which tensor parallelism cuts: the mean square is summed over tp, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm import Axis, all_reduce_
from frontier_llm.ops import statistics_dtype


class _SumOverRanks(Function):
    """Every rank's loss depends on the sum, and each rank has the gradient of its own heads alone: so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return all_reduce_(x.clone(), tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce_(grads[0].clone(), ctx.tp), None


def norm_over_heads(x_SBaD: Tensor, weight_aD: Tensor, eps: float, tp: Axis) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over all heads, (S, B, a, D) → (S, B, a, D)."""
    wide = x_SBaD.to(statistics_dtype(x_SBaD.dtype))
    squares_SB = _SumOverRanks.apply(wide.square().sum((-2, -1)), tp)
    numel = x_SBaD.shape[-2] * x_SBaD.shape[-1] * tp.size
    scale_SB = torch.rsqrt(squares_SB / numel + eps)
    return (wide * scale_SB[..., None, None] * weight_aD.to(wide.dtype)).to(x_SBaD.dtype)
