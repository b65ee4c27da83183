"""ShardSpec: what a rank owns of a parameter. ZeRO, gradient norm, tied weights, initialisation and checkpoints read
only this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from frontier_llm.blueprint.parameters import Parameter, Split

# elements: each parameter in a flat bucket, and each rank's slice of one, starts on a multiple; 256 bytes in bf16, the
# width that RCCL and
# vector loads like
BUCKET_ALIGNMENT = 128


@dataclass(frozen=True)
class ShardSpec:
    """One rank's rectangle of one global parameter. The local tensor has exactly `shape`; layers view it as they
    need.
    """

    parameter: Parameter
    offset: tuple[int, ...]  # of this rank's rectangle in the global tensor
    shape: tuple[int, ...]  # of this rank's rectangle
    coordinates: Mapping[str, int]  # this rank's, on each axis whose ranks hold the parameter, in parts or as copies

    @property
    def name(self) -> str:
        """Of the global parameter."""
        return self.parameter.name

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Of the global parameter."""
        return self.parameter.shape

    @property
    def counted(self) -> bool:
        """True on the one copy that enters the gradient norm and the checkpoint: the first on every axis that does
        not split it.
        """
        return not any(self.coordinates[axis] for axis in self.coordinates if not self.splits_over(axis))

    @property
    def numel(self) -> int:
        """Elements of this rank's rectangle."""
        return prod(self.shape)

    def splits_over(self, axis: str) -> bool:
        """True where the ranks of `axis` hold different parts; otherwise those that hold it hold copies."""
        return isinstance(self.parameter.axes.get(axis), Split)


def shard(
    parameter: Parameter,
    degrees: Mapping[str, int] | None = None,
    coordinates: Mapping[str, int] | None = None,
) -> ShardSpec:
    """The part of a parameter at `coordinates` of a mesh with these degrees, cut along every axis that splits it; by
    default all of it.

    The caller has checked divisibility (topology.plan does, for every layer).
    """
    degrees = degrees or {}
    coordinates = coordinates or {}
    shape = list(parameter.shape)
    offset = [0] * len(parameter.shape)
    for axis, how in parameter.axes.items():
        if isinstance(how, Split):
            part, rest = divmod(shape[how.dim], degrees.get(axis, 1))
            assert rest == 0, f"{parameter.name}: {shape[how.dim]} is not divisible by {axis} {degrees[axis]}"
            shape[how.dim] = part
            offset[how.dim] += part * coordinates.get(axis, 0)
    return ShardSpec(parameter, tuple(offset), tuple(shape), coordinates)
