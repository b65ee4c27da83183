"""Activation recomputation (Chen et al. 2016, arXiv:1604.06174): only a block's input is saved for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def recompute(run: Callable[..., Result], *inputs: Tensor) -> Result:
    """Return run(*inputs), saving only `inputs` for backward, which calls `run` again.

    Parameters inside `run` get their gradients as usual.
    """
    # The model uses no torch generator in training (dropout masks are functions of the sample), so no generator state
    # is saved.
    output: Result = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output
