"""Activation recomputation: keep a block's input, run it again in backward (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def recompute(run: Callable[..., Result], *inputs: Tensor) -> Result:
    """run(*inputs), saving only `inputs`. Parameters inside `run` get their gradients as usual."""
    # nothing in the model is random while training, so no generator state has to be kept
    output: Result = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output
