"""Buckets: flat contiguous buffers for the weights and gradients of several parameters, split evenly over dp.

A bucket is the unit of communication. One call reduce-scatters its gradients as soon as the last contribution of the
step has been added. One call all-gathers its weights after the update. Parameters are assigned to buckets in the order
in which backward completes their gradients (the reverse of the forward order). The first reductions therefore start
early in backward.

An all-gather may still be running when the next forward begins. Each read of a bucket's weights, or of a module's
parameter, first waits for the all-gather of that bucket. Callers therefore need not check whether weights are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from frontier_llm.blueprint.optimizers import OptimizerRule
from frontier_llm.blueprint.parameters import Parameter
from frontier_llm.comm import DONE, Axis, Pending, single, start_all_gather_into
from frontier_llm.ops import statistics_dtype
from frontier_llm.parallel.tensor import ShardedParameter
from frontier_llm.topology.buckets import plan_buckets
from frontier_llm.topology.shards import ShardSpec


@dataclass(frozen=True)
class OwnedRange:
    """Consecutive elements of one parameter inside this rank's slice of a bucket."""

    spec: ShardSpec
    start: int  # first element, counted in the flattened local part of the parameter
    stop: int
    position: int  # position of element `start` in the slice

    @property
    def place(self) -> slice:
        """Positions of these elements in the slice of the bucket."""
        return slice(self.position, self.position + self.stop - self.start)


@dataclass(eq=False, kw_only=True)
class Bucket:
    """Parameters that are communicated together. All parameters of a bucket have the same weight decay, the same
    gradient sums and the same kinds of optimizer state.
    """

    parameters: list[ShardedParameter]
    offsets: list[int]  # first element of each parameter in the bucket
    flat_weights: Tensor  # [numel], working precision; all elements are valid if `arriving` is DONE
    gradients: Tensor  # [numel], fp32 (fp64 under fp64)
    decay: bool  # weight decay applies to the parameters
    partial_axes: tuple[str, ...]  # gradients are summed over these axes before dp
    kinds: tuple[str, ...]  # Names of the tensors that the optimizer keeps: the master copy and its states.
    whole: bool  # the update needs complete tensors
    apart: bool  # True if `whole` is true and no parameter spans the slices of two owners
    dp: Axis
    owner: Axis  # dp with ZeRO-1. Otherwise an axis of one rank, which owns the complete bucket.
    first_use: int = 0  # position of the bucket's earliest parameter in the order of the forward pass
    arriving: Pending = field(default=DONE, repr=False)  # the running all-gather of the weights

    @property
    def weights(self) -> Tensor:
        """Weights of the bucket, [numel], in the working precision. They are equal on every dp rank.

        Reading this property waits for a running all-gather.
        """
        self.wait_for_gather()
        return self.flat_weights

    def start_gather(self) -> None:
        """Start the all-gather of the weights. Each owner contributes its slice."""
        self.arriving = start_all_gather_into(self.weights, self.own(self.weights), self.owner)

    def wait_for_gather(self) -> None:
        """Wait for the running gather, if there is one."""
        pending = self.arriving
        self.arriving = DONE
        pending.wait()

    def own(self, flat: Tensor) -> Tensor:
        """Return this rank's slice of `flat`, a tensor of the bucket's length."""
        return flat.chunk(self.owner.size)[self.owner.rank]

    def norm_share(self, flat: Tensor) -> tuple[Tensor, int]:
        """Return (slice of `flat`, its offset) for which this rank computes the squared gradient norm.

        The slice is one of dp equal parts of the bucket, with or without ZeRO.
        """
        share = flat.chunk(self.dp.size)[self.dp.rank]
        return share, self.dp.rank * share.numel()

    def ranges(self, start: int, stop: int) -> Iterator[OwnedRange]:
        """Yield the range of each parameter that has elements in [start, stop) of the bucket.

        Padding at the end of the bucket belongs to no parameter.
        """
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            first = max(start, offset)
            last = min(stop, offset + parameter.numel())
            if first < last:
                yield OwnedRange(parameter.spec, first - offset, last - offset, first - start)

    def owned_ranges(self) -> Iterator[OwnedRange]:
        """Yield the range of each parameter for which this rank holds optimizer state."""
        size = self.flat_weights.numel() // self.owner.size
        return self.ranges(size * self.owner.rank, size * (self.owner.rank + 1))


class _Parameters(dict[str, nn.Parameter | None]):
    """Replaces a module's dict of parameters, from which nn.Module reads `self.weight`.

    A lookup first waits for the all-gather of the parameter's bucket.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], buckets: Mapping[nn.Parameter, Bucket]) -> None:
        super().__init__(parameters)
        self._buckets = buckets

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._buckets[parameter].wait_for_gather()
        return parameter


def build_buckets(
    stages: Sequence[nn.Module],
    rule: OptimizerRule,
    dp: Axis,
    zero: int,
    device: torch.device,
    bucket_numel: int,
    *,
    edp: Axis | None = None,
) -> list[Bucket]:
    """Allocate the flat buffers and move every parameter of the stages into them. The stages are on the meta device.

    Afterwards each parameter is a view of its bucket's weights, and its main_grad is a view of the bucket's gradients.
    Weights are not initialised. Gradients are zero. `edp` is the data-parallel axis of the experts, or None without
    experts. If `rule` needs some parameters complete, these parameters have separate buckets (topology.buckets).
    """
    everything = (parameter for stage in stages for parameter in stage.parameters())
    declared = [parameter for parameter in dict.fromkeys(everything) if isinstance(parameter, ShardedParameter)]
    position = {parameter: index for index, parameter in enumerate(declared)}
    placed: dict[nn.Parameter, ShardedParameter] = {}
    bucket_of: dict[nn.Parameter, Bucket] = {}
    buckets = []

    def replicas_of(name: str) -> Axis:
        return edp if name == "edp" and edp is not None else dp

    def shard_of(parameter: ShardedParameter) -> tuple[Parameter, int]:
        return parameter.spec.parameter, parameter.numel()

    for plan in plan_buckets(
        declared[::-1],
        shard_of,
        rule,
        lambda name: replicas_of(name).size,
        bool(zero),
        bucket_numel,
    ):
        weights = torch.zeros(plan.numel, dtype=plan.members[0].dtype, device=device)
        gradients = torch.zeros(plan.numel, dtype=statistics_dtype(weights.dtype), device=device)
        real = [_view(*pair, weights, gradients) for pair in zip(plan.members, plan.offsets, strict=True)]
        spec = real[0].spec
        replicas = replicas_of(spec.parameter.replicas)
        bucket = Bucket(
            parameters=real,
            offsets=plan.offsets,
            flat_weights=weights,
            gradients=gradients,
            decay=spec.parameter.decay,
            partial_axes=spec.parameter.partial_axes(),
            kinds=rule.kinds(spec.parameter),
            whole=plan.whole,
            apart=plan.apart,
            dp=replicas,
            owner=replicas if zero else single(replicas.name, replicas.ranks[replicas.rank], replicas.ledger),
            first_use=min(position[parameter] for parameter in plan.members),
        )
        placed.update(zip(plan.members, real, strict=True))
        bucket_of.update(dict.fromkeys(real, bucket))
        buckets.append(bucket)
    for module in dict.fromkeys(module for stage in stages for module in stage.modules()):
        own = {name: None if parameter is None else placed[parameter] for name, parameter in module._parameters.items()}
        module._parameters = _Parameters(own, bucket_of)
    return buckets


def _view(declared: ShardedParameter, offset: int, weights: Tensor, gradients: Tensor) -> ShardedParameter:
    """Return the declared parameter as a view of the flat buffers."""
    place = slice(offset, offset + declared.numel())
    shape = declared.spec.shape
    parameter = ShardedParameter.create(weights[place].view(shape), declared.spec, declared.layer_accumulates)
    parameter.main_grad = gradients[place].view(shape)
    return parameter
