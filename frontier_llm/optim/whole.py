"""Whole tensors for updates that need them, from ZeRO's slices: one owner's, or gathered over dp where slices cut
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from frontier_llm.comm import Axis, start_all_gather_into
from frontier_llm.optim.buckets import Bucket
from frontier_llm.topology.shards import ShardSpec


class WholeTensors:
    """The parameters of a bucket of which this rank's slice holds at least an element; what tensor parallelism cuts
    stays cut.
    """

    def __init__(self, bucket: Bucket, tp: Axis) -> None:
        self._bucket = bucket
        self._runs = list(bucket.owned_ranges())
        self.tp = tp
        offsets = {
            parameter.spec.name: offset for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True)
        }
        slice_start = bucket.owner.rank * (bucket.flat_weights.numel() // bucket.owner.size) if bucket.apart else 0
        self._places = [
            slice(start := offsets[run.spec.name] - slice_start, start + run.spec.numel) for run in self._runs
        ]

    @property
    def specs(self) -> list[ShardSpec]:
        """Of the tensors, in order."""
        return [run.spec for run in self._runs]

    def of(self, own: Tensor) -> list[Tensor]:
        """The tensors of which `own`, [slice] on every owner, holds the values: each in its own shape. Collective
        over dp where slices cut them.
        """
        flat = own
        if not self._bucket.apart and self._bucket.owner.size > 1:
            flat = torch.empty(self._bucket.flat_weights.numel(), dtype=own.dtype, device=own.device)
            start_all_gather_into(flat, own, self._bucket.owner).wait()
        return [flat[place].view(spec.shape) for place, spec in zip(self._places, self.specs, strict=True)]

    def back(self, tensors: Sequence[Tensor], own: Tensor) -> None:
        """Put what belongs into this rank's slice there."""
        for run, tensor in zip(self._runs, tensors, strict=True):
            own[run.place] = tensor.view(-1)[run.start : run.stop]
