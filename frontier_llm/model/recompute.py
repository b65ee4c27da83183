"""Activation recomputation (Chen et al. 2016, arXiv:1604.06174): only a block's input is saved for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def recompute(run: Callable[..., Result], *inputs: Tensor) -> Result:
    """Return run(*inputs). Only `inputs` are saved, and backward calls `run` again.

    Parameters inside `run` get their gradients as usual.
    """
    # The state of torch's random generator need not be saved, because the model does not use it in training. Dropout
    # masks are functions of the sample.
    output: Result = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output
