"""RMSNorm over all heads, which tensor parallelism splits. The mean square is summed over tp, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from frontier_llm.comm import Axis, all_reduce_, moved
from frontier_llm.ops import statistics_dtype


def norm_over_heads(x_SBaD: Tensor, weight_aD: Tensor, eps: float, tp: Axis) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight, with the mean over all heads: (S, B, a, D) → (S, B, a, D)."""
    wide = x_SBaD.to(statistics_dtype(x_SBaD.dtype))
    # The mean square affects the heads of all ranks, and each rank has only the gradient through its own heads.
    # Backward therefore sums over tp, too.
    squares_SB = moved(wide.square().sum((-2, -1)), tp, _summed, _summed)
    numel = x_SBaD.shape[-2] * x_SBaD.shape[-1] * tp.size
    scale_SB = torch.rsqrt(squares_SB / numel + eps)
    return (wide * scale_SB[..., None, None] * weight_aD.to(wide.dtype)).to(x_SBaD.dtype)


def _summed(x: Tensor, tp: Axis) -> Tensor:
    return all_reduce_(x.clone(), tp)
