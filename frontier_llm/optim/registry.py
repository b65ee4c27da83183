"""Which optimizers there are. One is two things: the rule of what it keeps (blueprint, without torch), and the
update of one slice of it.
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
    """What is updated at once: tensors of one shape, of parameters that decay alike and keep the same states.

    They are flat runs through several parameters, or, where the rule says `whole` and not `gathers`, this rank's part
    of one parameter in its own shape.
    """

    master: Tensor  # fp32 (fp64 under fp64)
    gradient: Tensor  # like the master; the sum over all ranks, still multiplied by the loss scale
    states: Mapping[str, Tensor]  # like the master, by the names of the rule
    weights: Tensor  # working precision: to be set to the rounded master; may be the master itself
    decay: bool  # weight decay applies
    tensors: WholeTensors | None = None  # of flat runs whose rule gathers: the tensors of which they are parts
    # of flat runs whose rule declares some: what is kept of the parameters in other shapes
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
    """The part of an optimizer that knows its formula."""

    def update(self, part: Slice, lr: float, step: int, grad_scale: float | Tensor) -> None:
        """Update number `step` (from 1), in place; the gradient counts times `grad_scale` (unscaling and clipping in
        one factor).
        """


Make = Callable[[OptimizerConfig, Ops], SliceUpdate]

_MAKERS: dict[str, Make] = {}


def register(rule: OptimizerRule, make: Make) -> None:
    """Add an optimizer: from now on `optimizer.name: <rule.name>` trains with it, with ZeRO-1, checkpoints and
    replica checks.
    """
    declare(rule)
    _MAKERS[rule.name] = make


def slice_update(config: OptimizerConfig, ops: Ops) -> SliceUpdate:
    """The update of the optimizer that the run file names."""
    return _MAKERS[config.name](config, ops)
