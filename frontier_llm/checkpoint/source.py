"""Where a model's weights come from, whichever format and layout they were written in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from frontier_llm.config import ModelConfig
from frontier_llm.parallel.tensor import ShardedParameter


class WeightSource(Protocol):
    """Where a model's weights come from, by our names, whatever layout they were written in."""

    @property
    def model(self) -> ModelConfig:
        """The shape they belong to."""

    def rectangle(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Part [offset, offset + shape) of a global parameter, on the CPU, in the source's dtype."""


def load_weights(source: WeightSource, parameters: Iterable[ShardedParameter]) -> None:
    """Copy each parameter's rectangle from the source."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(source.rectangle(parameter.spec.name, parameter.spec.offset, parameter.spec.shape))
