"""Activation recomputation: keep a block's input, run it again in backward (Chen et al. 2016, arXiv:1604.06174).

Nothing in the model is random while training, so no generator state has to be kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class _Recompute(Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.run(*inputs)
        torch.autograd.backward(output, grads[0])
        return None, *(tensor.grad for tensor in inputs)


def recompute(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """run(*inputs), saving only `inputs`. Parameters inside `run` get their gradients as usual."""
    return _Recompute.apply(run, *inputs)
