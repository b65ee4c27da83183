"""What the pipeline engine requires of a virtual stage: its function, its output, its activations, and where its weight
gradients wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

LOSS = "loss"  # what the last stage returns as its output


class StageOutput(NamedTuple):
    """What a stage returns that has further losses: scalars, each this microbatch's share, the same on all tp ranks.

    What has no gradient is merely summed, whatever its shape.
    """

    output: Tensor
    losses: Mapping[str, Tensor]


StageFunction = Callable[[Tensor | None, Any], Tensor | StageOutput]


class Deferral(Protocol):
    """Where weight gradients wait between the I and the W of a split backward (tensor_parallel.WeightGradients)."""

    def defer(self) -> None:
        """Start keeping."""

    def take_deferred(self) -> list:
        """Stop, and hand over what was kept."""

    def run(self, work: list) -> None:
        """Do it."""


@dataclass(frozen=True)
class ActivationSpec:
    """Every message between stages is like this; static, so that no shapes are ever exchanged."""

    shape: tuple[int, ...]  # (S or s, B, H)
    dtype: torch.dtype
    device: torch.device
