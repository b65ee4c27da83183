"""Interface between the pipeline engine and a virtual stage.

The module defines the output of a stage, the shape of activations, and how weight gradients are computed later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

LOSS = "loss"  # name of the loss that is the last stage's output


class StageOutput(NamedTuple):
    """Return value of a stage with further losses.

    Each loss is a scalar: this microbatch's contribution to the step's loss, equal on all tp ranks. Values without a
    gradient are allowed too: the engine only sums them, and they may have any shape.
    """

    output: Tensor
    losses: Mapping[str, Tensor]


StageFunction = Callable[[Tensor | None, Any], Tensor | StageOutput]


class Deferral(Protocol):
    """Stores the computation of weight gradients from the I action (input gradients) until the W action.

    `WeightGradients` implements this interface.
    """

    def defer(self) -> None:
        """From now on, store submitted computations instead of executing them."""

    def take_deferred(self) -> list:
        """Stop storing computations, and return the stored computations."""

    def run(self, work: list) -> None:
        """Execute the stored computations."""


@dataclass(frozen=True)
class ActivationSpec:
    """Shape, dtype and device of every message between stages. They are static, so no shapes are exchanged."""

    shape: tuple[int, ...]  # (S or s, B, H)
    dtype: torch.dtype
    device: torch.device
