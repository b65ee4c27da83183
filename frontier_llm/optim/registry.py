"""Registry of optimizers.

An optimizer has two parts. Its rule (blueprint.optimizers, without torch) names its states. Its `SliceUpdate` updates
the weights and states of one ZeRO slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from frontier_llm.blueprint.optimizers import OptimizerRule, declare
from frontier_llm.config import OptimizerConfig
from frontier_llm.ops import Ops
from frontier_llm.optim.matrices import Statistics, WholeTensors


@dataclass(frozen=True)
class Slice:
    """Weights, gradient and states of elements that one call updates.

    All elements have the same weight decay and kinds of state.

    The tensors have equal shapes. Normally they are flat and may span several parameters. If the rule sets `whole` and
    not `gathers`, they are this rank's part of one parameter in its own shape.
    """

    master: Tensor  # fp32 (fp64 under fp64)
    gradient: Tensor  # dtype of the master; the sum over all ranks, still multiplied by the loss scale
    states: Mapping[str, Tensor]  # dtype of the master; by the names of the rule's states
    weights: Tensor  # working precision; receives the rounded master; in fp32 and fp64 it is the master itself
    decay: bool  # weight decay applies
    tensors: WholeTensors | None = None  # the complete tensors, if the rule gathers.
    # Statistics of the parameters, which have other shapes, if the rule declares any
    statistics: Statistics | None = None

    def apply(self, direction: Tensor, step_size: float, decay: float) -> None:
        """Subtract step_size * direction + decay * master from the master, and round it to the working weights.

        `decay` is the learning rate times the weight decay; it counts only if weight decay applies to this slice.
        Both terms are added before the master is rounded: rounding 1 - decay to fp32 would lose a decay below 6e-8.
        `direction` is overwritten.
        """
        direction.mul_(step_size)
        if self.decay:
            direction.add_(self.master, alpha=decay)
        self.master.sub_(direction)
        if self.weights.data_ptr() != self.master.data_ptr():
            self.weights.copy_(self.master)


class SliceUpdate(Protocol):
    """Interface of an optimizer's update formula."""

    def update(self, part: Slice, lr: float, step: int, grad_scale: float | Tensor) -> None:
        """Update `part` in place. `step` is the number of the update, counted from 1.

        The gradient is multiplied by `grad_scale`, which combines unscaling and clipping.
        """


Make = Callable[[OptimizerConfig, Ops], SliceUpdate]

_MAKERS: dict[str, Make] = {}


def register(rule: OptimizerRule, make: Make) -> None:
    """Register an optimizer. `optimizer.name: <rule.name>` selects it.

    ZeRO-1, checkpoints and replica checks then support it without further code.
    """
    declare(rule)
    _MAKERS[rule.name] = make


def slice_update(config: OptimizerConfig, ops: Ops) -> SliceUpdate:
    """Return the update of the optimizer that the run file names."""
    return _MAKERS[config.name](config, ops)
