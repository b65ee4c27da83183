"""The conjugate pairs of Megatron's tensor parallelism: what one does forward, the other does backward.

copy ↔ reduce (Shoeybi et al. 2019, arXiv:1909.08053, f and g) and gather ↔ scatter along the sequence
(Korthikanti et al. 2022, arXiv:2205.05198, g and g-bar). Sequence is dim 0, so every message is contiguous.
Each is the identity on an axis of size 1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm import Axis, all_gather, all_reduce_, reduce_scatter


class _Reduce(Function):
    """Forward all-reduce, backward identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce_(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ReduceScatter(Function):
    """Forward reduce-scatter along the sequence, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.axis), None


def sum_partial(x_SBH: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """Partial sums over tp → the sum: whole on every rank (S), or each rank's part of the sequence (s)."""
    if axis.size == 1:
        return x_SBH
    return _ReduceScatter.apply(x_SBH, axis) if sequence_parallel else _Reduce.apply(x_SBH, axis)
