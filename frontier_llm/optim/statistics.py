"""What an optimizer keeps of a bucket's parameters in other shapes than theirs: whole on every owner of a slice, and so
small that nobody shares it out.

Each owner adds up what it sees, of the elements in its slice and of its tensor-parallel part; the sums go over the
owners and over the axes that the rule names. So slices may cut parameters anywhere, and no matrix has to be brought
together.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from frontier_llm.blueprint.optimizers import STATISTIC, OptimizerRule
from frontier_llm.blueprint.parameters import Split
from frontier_llm.comm import Mesh, all_reduce_
from frontier_llm.optim.buckets import Bucket, OwnedRange
from frontier_llm.optim.state import StateRectangle
from frontier_llm.topology.rectangles import Rectangle
from frontier_llm.topology.shards import ShardSpec, shard


class Statistics:
    """Of one bucket: this rank's part of every tensor that the rule declares, one behind the other in `values`."""

    def __init__(self, bucket: Bucket, rule: OptimizerRule, mesh: Mesh) -> None:
        self._bucket = bucket
        self._of = {parameter.spec.name: _declared(rule, parameter.spec) for parameter in bucket.parameters}
        # what is summed over the same axes lies together, for one collective
        self._specs = sorted(
            (spec for specs in self._of.values() for spec in specs),
            key=lambda spec: spec.parameter.partial_axes(),
        )
        self.values = torch.zeros(
            sum(spec.numel for spec in self._specs),
            dtype=bucket.gradients.dtype,
            device=bucket.gradients.device,
        )
        groups = groupby(self._specs, key=lambda spec: spec.parameter.partial_axes())
        self._sums = [([mesh.axis(axis) for axis in axes], sum(spec.numel for spec in group)) for axes, group in groups]

    def runs(self) -> Iterator[OwnedRange]:
        """The parameters, or parts of them, that lie in this rank's slice."""
        return self._bucket.owned_ranges()

    def by_parameter(self, flat: Tensor) -> dict[str, list[Tensor]]:
        """A tensor that is laid out like `values`, as the tensors that the rule declares of each parameter, in its
        order; views.
        """
        views = self._views(flat)
        return {name: [views[spec.name] for spec in specs] for name, specs in self._of.items()}

    def sum_(self, flat: Tensor) -> Tensor:
        """Add up what the owners, and the ranks that hold other parts of the parameters, have found; laid out like
        `values`. Collective over both.
        """
        all_reduce_(flat, self._bucket.owner)
        for (axes, _), part in zip(self._sums, flat.split([numel for _, numel in self._sums]), strict=True):
            for axis in axes:
                all_reduce_(part, axis)
        return flat

    def state(self) -> Iterator[StateRectangle]:
        """Each tensor, by its own name."""
        views = self._views(self.values)
        for spec in self._specs:
            saved = spec.counted and self._bucket.dp.rank == 0
            yield StateRectangle(spec, Rectangle(spec.offset, spec.shape), saved, {STATISTIC: views[spec.name]})

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([spec.numel for spec in self._specs])
        return {spec.name: part.view(spec.shape) for spec, part in zip(self._specs, parts, strict=True)}


def _declared(rule: OptimizerRule, of: ShardSpec) -> list[ShardSpec]:
    """This rank's part of what the rule declares of a parameter."""
    degrees = {
        axis: of.global_shape[how.dim] // of.shape[how.dim]
        for axis, how in of.parameter.axes.items()
        if isinstance(how, Split)
    }
    return [shard(tensor, degrees, of.coordinates) for tensor in rule.statistics(of.parameter)]
