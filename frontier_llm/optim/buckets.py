"""Flat buffers: a rank's parameters lie in a few contiguous buckets, weights and gradients alike, cut evenly over dp.

A bucket is the unit of communication: its gradients are reduce-scattered in one call as soon as its last contribution
of the step is in, its weights are all-gathered in one call after the update. Buckets are filled in the order in which
backward completes them (the reverse of the forward order), so that the first reductions start while most of backward is
still to come.

A gather may still be under way when the next forward begins. Whoever takes a bucket's weights, or a parameter from its
module, waits for that bucket alone: there is no other way to reach them, so nothing has to know when weights are
complete.
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
    """A run of one parameter's elements inside this rank's slice of a bucket."""

    spec: ShardSpec
    start: int  # in the parameter's local flat order
    stop: int
    position: int  # of `start` in the slice

    @property
    def place(self) -> slice:
        """Of the run in the slice."""
        return slice(self.position, self.position + self.stop - self.start)


@dataclass(eq=False, kw_only=True)
class Bucket:
    """Parameters that decay alike, are summed alike, are updated alike and travel together."""

    parameters: list[ShardedParameter]
    offsets: list[int]  # of each parameter in the bucket
    flat_weights: Tensor  # [numel], working precision; complete when nothing is `arriving`
    gradients: Tensor  # [numel], fp32 (fp64 under fp64)
    decay: bool
    partial_axes: tuple[str, ...]  # summed over these before dp
    kinds: tuple[str, ...]  # what the optimizer keeps of them: the master copy and its states
    whole: bool  # the optimizer wants them whole
    apart: bool  # and each lies within one owner's slice
    dp: Axis
    owner: Axis  # dp with ZeRO-1; otherwise a single rank, which owns everything
    first_use: int = 0  # position of its earliest parameter in the order of the forward pass
    arriving: Pending = field(default=DONE, repr=False)  # the all-gather of its weights

    @property
    def weights(self) -> Tensor:
        """[numel], working precision, on every rank the same."""
        self.settle()
        return self.flat_weights

    def spread(self) -> None:
        """Begin to gather every owner's slice of the weights."""
        self.arriving = start_all_gather_into(self.weights, self.own(self.weights), self.owner)

    def settle(self) -> None:
        """Wait for the gather under way, if there is one."""
        pending = self.arriving
        self.arriving = DONE
        pending.wait()

    def own(self, flat: Tensor) -> Tensor:
        """This rank's slice of a bucket-long tensor."""
        return flat.chunk(self.owner.size)[self.owner.rank]

    def norm_share(self, flat: Tensor) -> tuple[Tensor, int]:
        """(slice, its offset) that this rank contributes to the gradient norm: one of dp equal parts, ZeRO or not."""
        share = flat.chunk(self.dp.size)[self.dp.rank]
        return share, self.dp.rank * share.numel()

    def ranges(self, start: int, stop: int) -> Iterator[OwnedRange]:
        """Which parameters' elements lie in [start, stop) of the bucket; the padding at its end belongs to none."""
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            first = max(start, offset)
            last = min(stop, offset + parameter.numel())
            if first < last:
                yield OwnedRange(parameter.spec, first - offset, last - offset, first - start)

    def owned_ranges(self) -> Iterator[OwnedRange]:
        """Which parameters' elements this rank's optimizer state covers."""
        size = self.flat_weights.numel() // self.owner.size
        return self.ranges(size * self.owner.rank, size * (self.owner.rank + 1))


class _Parameters(dict[str, nn.Parameter | None]):
    """A module's parameters. A layer reaches one as `self.weight`, which nn.Module looks up here: its bucket must
    have arrived by then.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], buckets: Mapping[nn.Parameter, Bucket]) -> None:
        super().__init__(parameters)
        self._buckets = buckets

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._buckets[parameter].settle()
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
    """Allocate the flat buffers and put every parameter of the (meta) stages into them.

    Afterwards each parameter is a view of its bucket's weights and its main_grad a view of the gradients. Weights are
    uninitialised, gradients zero. `edp` has the experts' replicas (None: there are no experts). Parameters that `rule`
    wants whole lie in buckets of their own (see topology.buckets).
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
    """A declared parameter at its place in the flat buffers."""
    place = slice(offset, offset + declared.numel())
    shape = declared.spec.shape
    parameter = ShardedParameter.create(weights[place].view(shape), declared.spec, declared.layer_accumulates)
    parameter.main_grad = gradients[place].view(shape)
    return parameter
