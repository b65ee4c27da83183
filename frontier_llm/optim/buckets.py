"""Flat buffers: a rank's parameters lie in a few contiguous buckets, weights and gradients alike, cut evenly over dp.

A bucket is the unit of communication: its gradients are reduce-scattered in one call as soon as its last contribution of the step
is in, its weights are all-gathered in one call after the update. Buckets are filled in the order in which backward completes
them (the reverse of the forward order), so that the first reductions start while most of backward is still to come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from frontier_llm.comm import Axis
from frontier_llm.tensor_parallel import ShardedParameter
from frontier_llm.topology import ShardSpec

# Slices start on 128-element boundaries: 256 bytes in bf16, the width that RCCL and vector loads like.
ALIGNMENT = 128


@dataclass(frozen=True)
class OwnedRange:
    """A run of one parameter's elements inside this rank's slice of a bucket."""

    spec: ShardSpec
    start: int  # in the parameter's local flat order
    stop: int
    position: int  # of `start` in the slice


@dataclass
class Bucket:
    """Parameters that decay alike, are summed alike and travel together."""

    parameters: list[ShardedParameter]
    offsets: list[int]  # of each parameter in the bucket
    weights: Tensor  # [numel], working precision
    gradients: Tensor  # [numel], fp32 (fp64 under fp64)
    decay: bool
    extra_sum: str | None  # "tp" or "tied": summed over that axis before dp
    owner: Axis  # dp with ZeRO-1; otherwise a single rank, which owns everything
    reduced: Axis  # dp

    def own(self, flat: Tensor) -> Tensor:
        """This rank's slice of a bucket-long tensor."""
        return flat.chunk(self.owner.size)[self.owner.rank]

    def norm_share(self, flat: Tensor) -> tuple[Tensor, int]:
        """(slice, its offset) that this rank contributes to the gradient norm: one of dp equal parts, ZeRO or not."""
        share = flat.chunk(self.reduced.size)[self.reduced.rank]
        return share, self.reduced.rank * share.numel()

    def ranges(self, start: int, stop: int) -> Iterator[OwnedRange]:
        """Which parameters' elements lie in [start, stop) of the bucket; the padding at its end belongs to none."""
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            first, last = max(start, offset), min(stop, offset + parameter.numel())
            if first < last:
                yield OwnedRange(parameter.spec, first - offset, last - offset, first - start)

    def owned_ranges(self) -> Iterator[OwnedRange]:
        """Which parameters' elements this rank's optimizer state covers."""
        size = self.weights.numel() // self.owner.size
        return self.ranges(size * self.owner.rank, size * (self.owner.rank + 1))


def _sort_key(parameter: ShardedParameter) -> tuple[bool, str]:
    return parameter.spec.decay, _extra_sum(parameter.spec) or ""


def _extra_sum(spec: ShardSpec) -> str | None:
    if spec.sum_over_tp:
        return "tp"
    return "tied" if spec.tied_copies > 1 else None


def _pack(parameters: Sequence[ShardedParameter], limit: int) -> Iterator[list[ShardedParameter]]:
    """Consecutive parameters of one kind, at most `limit` elements together (a larger one stands alone)."""
    for _, kind in groupby(sorted(parameters, key=_sort_key), key=_sort_key):
        bucket: list[ShardedParameter] = []
        for parameter in kind:
            if bucket and sum(member.numel() for member in bucket) + parameter.numel() > limit:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket


def build_buckets(stages: Sequence[nn.Module], dp: Axis, zero: int, device: torch.device, bucket_numel: int) -> list[Bucket]:
    """Allocate the flat buffers and put every parameter of the (meta) stages into them.

    Afterwards each parameter is a view of its bucket's weights and its main_grad a view of the gradients. Weights are
    uninitialised, gradients zero.
    """
    everything = (parameter for stage in stages for parameter in stage.parameters())
    declared = [parameter for parameter in dict.fromkeys(everything) if isinstance(parameter, ShardedParameter)]
    placed: dict[ShardedParameter, ShardedParameter] = {}
    buckets = [_allocate(group, placed, dp, zero, device) for group in _pack(declared[::-1], bucket_numel)]
    for stage in stages:
        for module in stage.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = placed[parameter]  # type: ignore[index]
    return buckets


def _allocate(
    parameters: list[ShardedParameter], placed: dict[ShardedParameter, ShardedParameter], dp: Axis, zero: int, device: torch.device
) -> Bucket:
    sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    chunk = ALIGNMENT * dp.size
    numel = -(-sum(sizes) // chunk) * chunk
    dtype = parameters[0].dtype
    weights = torch.zeros(numel, dtype=dtype, device=device)
    gradients = torch.zeros(numel, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
    real = []
    for declared, offset in zip(parameters, offsets, strict=True):
        view = slice(offset, offset + declared.numel())
        shape = declared.spec.shape
        parameter = ShardedParameter.create(weights[view].view(shape), declared.spec, declared.layer_accumulates, declared.uses)
        parameter.main_grad = gradients[view].view(shape)
        placed[declared] = parameter
        real.append(parameter)
    spec = parameters[0].spec
    owner = dp if zero else Axis(dp.name, 0, 1, (dp.ranks[dp.rank],), None, dp.ledger)
    return Bucket(real, offsets, weights, gradients, spec.decay, _extra_sum(spec), owner, dp)
