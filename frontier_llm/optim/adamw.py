"""ZeRO-1 AdamW (Rajbhandari et al. 2020, arXiv:1910.02054) in three phases: own slice of the gradient, update it, gather weights.

Buckets are updated in the order in which the next forward needs them, and each gather starts as soon as its update is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.comm import Mesh
from frontier_llm.config import OptimizerConfig
from frontier_llm.ops import AdamWUpdate, Ops
from frontier_llm.optim.buckets import Bucket
from frontier_llm.optim.state import KINDS, StateRectangle, state_of_run
from frontier_llm.topology import ShardSpec


@dataclass
class BucketState:
    """fp32 (fp64 under fp64) optimizer state of this rank's slice of one bucket."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class AdamW:
    """Updates the slices that this rank owns. With fp32 or fp64 weights the master copy *is* the slice of the weights."""

    def __init__(self, buckets: Sequence[Bucket], config: OptimizerConfig, mesh: Mesh, ops: Ops, overlap_gather: bool = False) -> None:
        """Masters are copied from the weights: build after the weights have been initialised.

        With `overlap_gather`, `step` returns while weights are still being gathered (see optim.buckets).
        """
        self.buckets, self.updates = buckets, 0
        self._config, self._mesh, self._ops, self._overlap_gather = config, mesh, ops, overlap_gather
        self.states = [_new_state(bucket) for bucket in buckets]
        self._norm_spans = [_norm_spans(bucket) for bucket in buckets]

    def squared_norm_share(self) -> Tensor:
        """This rank's summand of the squared L2 norm of the whole model's gradient, still multiplied by the loss scale; 0-dim fp64.

        Each element counts once: dp slices partition a bucket, and of tp-replicated or tied parameters only one replica counts.
        The others are multiplied by zero, so that a replica adds nothing but is heard where it is not finite.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.buckets[0].gradients.device)
        for bucket, spans in zip(self.buckets, self._norm_spans, strict=True):
            share, _ = bucket.norm_share(bucket.gradients)
            for start, stop, counted in spans:
                total += self._ops.sum_of_squares(share[start:stop]) * counted
        return total

    def step(self, lr: float, grad_scale: float) -> None:
        """One update: `grad_scale` multiplies the gradient (unscaling and clipping in one factor)."""
        self.updates += 1
        for bucket, state in sorted(zip(self.buckets, self.states, strict=True), key=lambda pair: pair[0].first_use):
            gradient, weights = bucket.own(bucket.gradients), bucket.own(bucket.weights)
            decay = self._config.weight_decay if bucket.decay else 0.0
            update = AdamWUpdate(lr, *self._config.betas, self._config.eps, decay, self.updates, grad_scale)
            self._ops.adamw_(state.master, gradient, state.exp_avg, state.exp_avg_sq, weights, update)
            bucket.spread()
        if not self._overlap_gather:
            self.settle()

    def settle(self) -> None:
        """Wait for every gather under way: before a rank looks at parameters that it holds without their module, and before it leaves."""
        for bucket in self.buckets:
            bucket.settle()

    @property
    def sharded(self) -> bool:
        """See Optimizer."""
        return self.buckets[0].owner.size > 1

    @property
    def device(self) -> torch.device:
        """See Optimizer."""
        return self.buckets[0].weights.device

    def state(self) -> list[StateRectangle]:
        """See Optimizer. Saved is one of dp equal parts, with ZeRO or without, so that all ranks share the work."""
        return [part for bucket, state in zip(self.buckets, self.states, strict=True) for part in _state_of(bucket, state)]

    def weights(self) -> list[tuple[ShardSpec, Tensor]]:
        """See Optimizer."""
        return [(parameter.spec, parameter.data) for bucket in self.buckets for parameter in bucket.parameters]

    def weights_from_masters(self) -> None:
        """See Optimizer."""
        for bucket, state in zip(self.buckets, self.states, strict=True):
            own = bucket.own(bucket.weights)
            if own.data_ptr() != state.master.data_ptr():
                own.copy_(state.master)
            bucket.spread()
        self.settle()


def _new_state(bucket: Bucket) -> BucketState:
    own = bucket.own(bucket.weights)
    master = own if own.dtype == bucket.gradients.dtype else own.to(bucket.gradients.dtype)
    return BucketState(master, torch.zeros_like(master), torch.zeros_like(master))


def _state_of(bucket: Bucket, state: BucketState) -> Iterator[StateRectangle]:
    """Of dp equal parts of the bucket those that this rank's state covers: its own with ZeRO, else all, of which it saves its own."""
    size, held = bucket.flat_weights.numel() // bucket.dp.size, state.master.numel()
    begin = bucket.owner.rank * held  # of the state, in the bucket
    for part in range(begin // size, (begin + held) // size):
        for run in bucket.ranges(part * size, (part + 1) * size):
            first = part * size + run.position - begin
            flat = {kind: getattr(state, kind)[first : first + run.stop - run.start] for kind in KINDS}
            yield from state_of_run(run.spec, run.start, run.stop, run.spec.counted and part == bucket.dp.rank, flat)


def _norm_spans(bucket: Bucket) -> list[tuple[int, int, int]]:
    """Merged (start, stop, counted) runs of this rank's norm share; counted is 1 or, for replicas that another rank counts, 0."""
    share, offset = bucket.norm_share(bucket.gradients)
    spans: list[tuple[int, int, int]] = []
    for piece in bucket.ranges(offset, offset + share.numel()):
        start, stop, counted = piece.position, piece.position + piece.stop - piece.start, int(piece.spec.counted)
        if spans and spans[-1][1:] == (start, counted):
            start = spans.pop()[0]
        spans.append((start, stop, counted))
    return spans
