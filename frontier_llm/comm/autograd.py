"""Collectives inside of a graph: what moves forward one way moves its gradient another way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm.axis import Axis

Move = Callable[[Tensor, Axis], Tensor]


def moved(x: Tensor, axis: Axis, there: Move, back: Move) -> Tensor:
    """there(x, axis), a tensor of its own; its backward is back(gradient, axis)."""
    return _Moved.apply(x, axis, there, back)


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, there: Move, back: Move) -> Tensor:
        ctx.axis = axis
        ctx.back = back
        return there(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0], ctx.axis), None, None, None
