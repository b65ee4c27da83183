"""Tensors that Muon and Adafactor need beyond a rank's ZeRO slice: complete matrices, and means of rows and columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from frontier_llm.blueprint.optimizers import STATISTIC, OptimizerRule
from frontier_llm.blueprint.parameters import Split
from frontier_llm.comm import Axis, Mesh, all_reduce_, start_all_gather_into
from frontier_llm.optim.buckets import Bucket, OwnedRange
from frontier_llm.optim.state import StateRectangle
from frontier_llm.topology.rectangles import Rectangle
from frontier_llm.topology.shards import ShardSpec, shard


class WholeTensors:
    """Gathers complete tensors over dp: all parameters of a bucket with at least one element in this rank's slice.

    A parameter that tensor parallelism splits is gathered over dp only, not over tp.
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
        """Specs of the complete tensors, in the order in which `of` returns them."""
        return [run.spec for run in self._runs]

    def of(self, own: Tensor) -> list[Tensor]:
        """Return the complete tensors, each in its own shape. `own` is this rank's slice of the flat bucket, 1-D.

        If tensors span several slices, the call is collective over dp.
        """
        flat = own
        if not self._bucket.apart and self._bucket.owner.size > 1:
            flat = torch.empty(self._bucket.flat_weights.numel(), dtype=own.dtype, device=own.device)
            start_all_gather_into(flat, own, self._bucket.owner).wait()
        return [flat[place].view(spec.shape) for place, spec in zip(self._places, self.specs, strict=True)]

    def back(self, tensors: Sequence[Tensor], own: Tensor) -> None:
        """Write this rank's elements of the complete tensors back into its slice `own`."""
        for run, tensor in zip(self._runs, tensors, strict=True):
            own[run.place] = tensor.view(-1)[run.start : run.stop]


class Statistics:
    """Statistics of one bucket: tensors such as Adafactor's means that an optimizer's rule declares for parameters.

    This rank's parts of all statistics are concatenated in `values`.
    """

    def __init__(self, bucket: Bucket, rule: OptimizerRule, mesh: Mesh) -> None:
        self._bucket = bucket
        self._of = {parameter.spec.name: _declared(rule, parameter.spec) for parameter in bucket.parameters}
        # Sort the tensors by the axes over which they are summed, so that one collective sums all tensors with the same
        # axes.
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
        """Return the ranges of parameters in this rank's slice."""
        return self._bucket.owned_ranges()

    def by_parameter(self, flat: Tensor) -> dict[str, list[Tensor]]:
        """Return views of `flat` by parameter name. `flat` has the layout of `values`.

        A parameter has one view for each statistic that the rule declares, in the rule's order.
        """
        views = self._views(flat)
        return {name: [views[spec.name] for spec in specs] for name, specs in self._of.items()}

    def sum_(self, flat: Tensor) -> Tensor:
        """Sum `flat` in place over the owners' slices, and over the tp ranks that split the averaged dim.

        `flat` has the layout of `values`. The call is collective over the axes of these sums.
        """
        all_reduce_(flat, self._bucket.owner)
        for (axes, _), part in zip(self._sums, flat.split([numel for _, numel in self._sums]), strict=True):
            for axis in axes:
                all_reduce_(part, axis)
        return flat

    def state(self) -> Iterator[StateRectangle]:
        """Yield each statistic as a `StateRectangle` under its own name."""
        views = self._views(self.values)
        for spec in self._specs:
            saved = spec.counted and self._bucket.dp.rank == 0
            yield StateRectangle(spec, Rectangle(spec.offset, spec.shape), saved, {STATISTIC: views[spec.name]})

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([spec.numel for spec in self._specs])
        return {spec.name: part.view(spec.shape) for spec, part in zip(self._specs, parts, strict=True)}


def _declared(rule: OptimizerRule, of: ShardSpec) -> list[ShardSpec]:
    """Return the specs of this rank's parts of the statistics that the rule declares for the parameter `of`."""
    degrees = {
        axis: of.global_shape[how.dim] // of.shape[how.dim]
        for axis, how in of.parameter.axes.items()
        if isinstance(how, Split)
    }
    return [shard(tensor, degrees, of.coordinates) for tensor in rule.statistics(of.parameter)]
