"""The narrow face of every optimizer: what the training step, the checkpoints and the comparison of replicas need of
it, and no more.

An optimizer's state is a list of rectangles of named global tensors, as views that may be read and filled. So a
checkpoint depends neither on the layout nor on the engine that wrote it. Only the masters of the weights and the states
of the optimizer's rule are kept: the working weights are cast(master) on every rank, so storing them would add a fifth
to a quarter to the bytes and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from frontier_llm.blueprint.optimizers import MASTER, OptimizerRule
from frontier_llm.optim.buckets import Bucket
from frontier_llm.topology.rectangles import Rectangle, rectangles_of_run
from frontier_llm.topology.shards import ShardSpec


@dataclass(frozen=True)
class StateRectangle:
    """A rectangle of a global tensor, a parameter or a statistic of the optimizer's, and this rank's optimizer state
    of it.
    """

    spec: ShardSpec  # of this rank's part of the parameter
    rectangle: Rectangle  # inside that part, in coordinates of the global tensor
    saved: bool  # of all replicas of these elements, the one that goes into checkpoints
    # by kind, fp32 (fp64 under fp64), of the rectangle's shape: views of the state itself. Of a statistic there is no
    # master
    tensors: Mapping[str, Tensor]

    @property
    def name(self) -> str:
        """Of the global tensor."""
        return self.spec.name

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Of the global tensor."""
        return self.spec.global_shape


def state_of_run(
    spec: ShardSpec, start: int, stop: int, saved: bool, flat: Mapping[str, Tensor]
) -> Iterator[StateRectangle]:
    """Elements [start, stop) of a rank's parameter, in its flat order, as rectangles; `flat` holds their state, 1-D,
    by kind.
    """
    position = 0
    for local in rectangles_of_run(spec.shape, start, stop):
        end = position + local.numel
        views = {kind: values[position:end].view(local.shape) for kind, values in flat.items()}
        yield StateRectangle(spec, local.shifted(spec.offset), saved, views)
        position = end


def state_of_bucket(bucket: Bucket, state: dict[str, Tensor]) -> Iterator[StateRectangle]:
    """This rank's state of a bucket as rectangles; `state`: its slice by kind.

    The bucket is split into dp equal parts. With ZeRO a rank holds one part. Without ZeRO it holds all parts and saves
    one.
    """
    size = bucket.flat_weights.numel() // bucket.dp.size
    held = state[MASTER].numel()
    begin = bucket.owner.rank * held  # of the state, in the bucket
    for part in range(begin // size, (begin + held) // size):
        for run in bucket.ranges(part * size, (part + 1) * size):
            first = part * size + run.position - begin
            flat = {kind: values[first : first + run.stop - run.start] for kind, values in state.items()}
            yield from state_of_run(run.spec, run.start, run.stop, run.spec.counted and part == bucket.dp.rank, flat)


class GradientSums(Protocol):
    """What happens to gradients between the backward passes of a step and its update."""

    def begin(self) -> None:
        """Forget the last step's gradients and expect a new step's."""

    def finish(self) -> None:
        """Wait until this rank has the full sums of what it updates. Collective over dp, tp and tied."""


class Optimizer(Protocol):
    """One rank's part of the update, whatever engine does it."""

    rule: OptimizerRule  # what it keeps of each parameter
    updates: int  # steps that were not skipped: what Adam's bias correction counts; set on resume

    @property
    def shards(self) -> int:
        """Neighbouring replicas that share out the state, and so many apart hold copies of it; 1 where each has all
        of it.
        """

    @property
    def device(self) -> torch.device:
        """Where collectives about the state take place."""

    def squared_norm_share(self) -> Tensor:
        """This rank's summand of the squared L2 norm of the whole model's gradient, times the loss scale squared; 0-dim
        fp64.

        Not finite on some rank where the gradient is not.
        """

    def step(self, lr: float, grad_scale: float | Tensor) -> None:
        """One update: `grad_scale` multiplies the gradient (unscaling and clipping in one factor); it may lie on the
        device.
        """

    def settle(self) -> None:
        """Wait for weights that are still being gathered: before a rank looks at them without their module, and
        before it leaves.
        """

    def state(self) -> list[StateRectangle]:
        """What this rank holds, replicas included; the views stay valid for as long as the optimizer lives."""

    def weights(self) -> list[tuple[ShardSpec, Tensor]]:
        """The working weights that this rank keeps between steps; equal on all replicas."""

    def weights_from_masters(self) -> None:
        """Make the working weights follow masters that were filled from outside. Collective over dp."""
