"""Interface between the pipeline engine and a virtual stage.

It defines the stage's function, its output, its activations, and the deferral of its weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

LOSS = "loss"  # name of the last stage's output


class StageOutput(NamedTuple):
    """Return value of a stage with further losses.

    Each loss is a scalar, this microbatch's share of the step's loss, and equal on all tp ranks.
    A value without a gradient is only summed and may have any shape.
    """

    output: Tensor
    losses: Mapping[str, Tensor]


StageFunction = Callable[[Tensor | None, Any], Tensor | StageOutput]


class Deferral(Protocol):
    """Keeps the work of weight gradients between the I and the W of a split backward (see `WeightGradients`)."""

    def defer(self) -> None:
        """Keep the work that is submitted from now on."""

    def take_deferred(self) -> list:
        """Stop keeping work, and return the work that was kept."""

    def run(self, work: list) -> None:
        """Do the kept work."""


@dataclass(frozen=True)
class ActivationSpec:
    """Shape, dtype and device of every message between stages. They are static, so no shapes are exchanged."""

    shape: tuple[int, ...]  # (S or s, B, H)
    dtype: torch.dtype
    device: torch.device
