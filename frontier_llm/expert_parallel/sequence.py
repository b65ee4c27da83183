"""Between the layout of attention and that of experts: without sequence parallelism each tensor rank routes its part of the sequence alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm import Axis, all_gather


class _TakePart(Function):
    @staticmethod
    def forward(ctx: Any, x_SBH: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return x_SBH.chunk(tp.size)[tp.rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0].contiguous(), ctx.tp), None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x_sBH: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return all_gather(x_sBH.contiguous(), tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.tp.size)[ctx.tp.rank], None


def take_part(x_SBH: Tensor, tp: Axis) -> Tensor:
    """(S, B, H), the same on all ranks → (s, B, H). Backward gathers, so that each rank has the gradient of all positions."""
    return x_SBH if tp.size == 1 else _TakePart.apply(x_SBH, tp)


def gather_sequence(x_sBH: Tensor, tp: Axis) -> Tensor:
    """(s, B, H) → (S, B, H). Backward takes this rank's part of a gradient that is the same on all."""
    return x_sBH if tp.size == 1 else _GatherSequence.apply(x_sBH, tp)
