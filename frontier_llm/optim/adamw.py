"""ZeRO-1 AdamW (Rajbhandari et al. 2020, arXiv:1910.02054) in three phases: own slice of the gradient, update it, gather weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.comm import Mesh, all_reduce_, start_all_gather_into
from frontier_llm.config import OptimizerConfig
from frontier_llm.ops import Ops
from frontier_llm.optim.buckets import Bucket


@dataclass
class BucketState:
    """fp32 (fp64 under fp64) optimizer state of this rank's slice of one bucket."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class AdamW:
    """Updates the slices that this rank owns. With fp32 or fp64 weights the master copy *is* the slice of the weights."""

    def __init__(self, buckets: Sequence[Bucket], config: OptimizerConfig, mesh: Mesh, ops: Ops) -> None:
        """Masters are copied from the weights: build after the weights have been initialised."""
        self.buckets, self.updates = buckets, 0
        self._config, self._mesh, self._ops = config, mesh, ops
        self.states = [_new_state(bucket) for bucket in buckets]
        self._norm_spans = [_norm_spans(bucket) for bucket in buckets]

    def gradient_norm(self) -> Tensor:
        """L2 norm of the whole model's gradient, still multiplied by the loss scale; 0-dim fp64, the same on every rank.

        Each element counts once: dp slices partition a bucket, and of tp-replicated or tied parameters only one replica counts.
        The others are multiplied by zero, so that a replica adds nothing but is heard where it is not finite.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.buckets[0].gradients.device)
        for bucket, spans in zip(self.buckets, self._norm_spans, strict=True):
            share, _ = bucket.norm_share(bucket.gradients)
            for start, stop, counted in spans:
                total += self._ops.sum_of_squares(share[start:stop]) * counted
        return all_reduce_(total, self._mesh.world).sqrt()

    def step(self, lr: float, grad_scale: float) -> None:
        """One update: `grad_scale` multiplies the gradient (unscaling and clipping in one factor)."""
        self.updates += 1
        beta1, beta2 = self._config.betas
        gathers = []
        for bucket, state in zip(self.buckets, self.states, strict=True):
            self._ops.adamw_(
                state.master,
                bucket.own(bucket.gradients),
                state.exp_avg,
                state.exp_avg_sq,
                bucket.own(bucket.weights),
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                eps=self._config.eps,
                weight_decay=self._config.weight_decay if bucket.decay else 0.0,
                step=self.updates,
                grad_scale=grad_scale,
            )
            gathers.append(start_all_gather_into(bucket.weights, bucket.own(bucket.weights), bucket.owner))
        for gather in gathers:
            gather.wait()

    def masters_from_weights(self) -> None:
        """Take new masters from the weights, e.g. after an import."""
        for bucket, state in zip(self.buckets, self.states, strict=True):
            state.master.copy_(bucket.own(bucket.weights))


def _new_state(bucket: Bucket) -> BucketState:
    own = bucket.own(bucket.weights)
    master = own if own.dtype == bucket.gradients.dtype else own.to(bucket.gradients.dtype)
    return BucketState(master, torch.zeros_like(master), torch.zeros_like(master))


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
