"""Interface of an optimizer, as used by the training step, the checkpoints and the comparison of replicas.

An optimizer's state is a list of rectangles (index ranges in each dim) of named global tensors. The rectangles are
views, so a checkpoint can read and fill them. A checkpoint therefore depends neither on the layout nor on the engine
that wrote it. Only master weights and optimizer states are saved. The working weights are the rounded masters. Saving
them too would increase a checkpoint by a fifth to a quarter.
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
    """A rectangle of a global tensor, with this rank's optimizer state for its elements.

    The tensor is a parameter, or a statistic that the optimizer keeps.
    """

    spec: ShardSpec  # this rank's part of the parameter
    rectangle: Rectangle  # rectangle inside this rank's part, in coordinates of the global tensor
    saved: bool  # True on the one replica whose copy of these elements is saved in checkpoints.
    # Views of the state by kind (master or name of the state), fp32 (fp64 under fp64), in the rectangle's shape. A
    # statistic has no master.
    tensors: Mapping[str, Tensor]

    @property
    def name(self) -> str:
        """Name of the global tensor."""
        return self.spec.name

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the global tensor."""
        return self.spec.global_shape


def state_of_run(
    spec: ShardSpec, start: int, stop: int, saved: bool, flat: Mapping[str, Tensor]
) -> Iterator[StateRectangle]:
    """Yield the state of elements [start, stop) of a rank's parameter, in its flat order, as rectangles.

    `flat` holds the state of these elements by kind, 1-D.
    """
    position = 0
    for local in rectangles_of_run(spec.shape, start, stop):
        end = position + local.numel
        views = {kind: values[position:end].view(local.shape) for kind, values in flat.items()}
        yield StateRectangle(spec, local.shifted(spec.offset), saved, views)
        position = end


def state_of_bucket(bucket: Bucket, state: dict[str, Tensor]) -> Iterator[StateRectangle]:
    """Yield this rank's state of a bucket as rectangles. `state` has this rank's slice of each kind of state.

    The bucket is split into dp equal parts. With ZeRO a rank holds one part. Without ZeRO it holds all parts and saves
    one.
    """
    size = bucket.flat_weights.numel() // bucket.dp.size
    held = state[MASTER].numel()
    begin = bucket.owner.rank * held  # first element of the state in the bucket
    for part in range(begin // size, (begin + held) // size):
        for run in bucket.ranges(part * size, (part + 1) * size):
            first = part * size + run.position - begin
            flat = {kind: values[first : first + run.stop - run.start] for kind, values in state.items()}
            yield from state_of_run(run.spec, run.start, run.stop, run.spec.counted and part == bucket.dp.rank, flat)


class GradientSums(Protocol):
    """Interface for summing gradients over ranks, between the backward passes of a step and its update."""

    def begin(self) -> None:
        """Zero the gradients. The gradients of a new step follow."""

    def finish(self) -> None:
        """Complete the gradient sums of this rank's part. Collective over dp, tp and tied."""


class Optimizer(Protocol):
    """Interface of an optimizer on one rank, which every engine implements."""

    rule: OptimizerRule  # names the states that the optimizer keeps of each parameter
    updates: int  # steps that were not skipped, for Adam's bias correction; restored on resume

    @property
    def shards(self) -> int:
        """Number of consecutive replicas that shard the optimizer state. 1 means that the state is replicated."""

    @property
    def device(self) -> torch.device:
        """Device for the tensors of collectives that compare or exchange the state."""

    def squared_norm_share(self) -> Tensor:
        """Return this rank's summand of the squared L2 norm of the model's gradient, times the squared loss scale.

        A 0-dim fp64 tensor. If the gradient is not finite, the summand of at least one rank is not finite.
        """

    def step(self, lr: float, grad_scale: float | Tensor) -> None:
        """Update once. The gradient is multiplied by `grad_scale`, which combines unscaling and clipping.

        `grad_scale` may be a tensor on the device.
        """

    def wait_for_gather(self) -> None:
        """Wait for weights that are still being gathered.

        Call this method before a rank exits, and before weights are read otherwise than through a module's parameter.
        """

    def state(self) -> list[StateRectangle]:
        """Return the state on this rank, including copies of state that another rank saves.

        The views stay valid for the lifetime of the optimizer.
        """

    def weights(self) -> list[tuple[ShardSpec, Tensor]]:
        """Return the working weights that this rank keeps between steps. They are equal on all replicas."""

    def weights_from_masters(self) -> None:
        """Set the working weights from masters that a caller has filled. Collective over dp."""
