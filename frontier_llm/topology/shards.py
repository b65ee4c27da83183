"""ShardSpec: the part of a parameter that a rank holds.

ZeRO, the gradient norm, tied weights, initialisation and checkpoints all use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from frontier_llm.blueprint.parameters import Parameter, Split

# Alignment in elements: each parameter in a flat bucket, and each rank's slice of a bucket, starts at a multiple of
# this number. In bf16 the alignment is 256 bytes, with which RCCL and vector loads are fast.
BUCKET_ALIGNMENT = 128


@dataclass(frozen=True)
class ShardSpec:
    """The rectangle of a global parameter that one rank holds. The rank's tensor has the shape `shape`."""

    parameter: Parameter
    offset: tuple[int, ...]  # Offset of this rank's rectangle in the global tensor.
    shape: tuple[int, ...]  # Shape of this rank's rectangle.
    coordinates: Mapping[str, int]  # This rank's index on each axis that splits or copies the parameter.

    @property
    def name(self) -> str:
        """Name of the global parameter."""
        return self.parameter.name

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the global parameter."""
        return self.parameter.shape

    @property
    def counted(self) -> bool:
        """True if this rank's copy counts in the gradient norm and is saved in checkpoints. A parameter that is
        replicated over several ranks therefore counts once.

        The copy that counts has index 0 on every axis that does not split the parameter.
        """
        return not any(self.coordinates[axis] for axis in self.coordinates if not self.splits_over(axis))

    @property
    def numel(self) -> int:
        """Number of elements of this rank's rectangle."""
        return prod(self.shape)

    def splits_over(self, axis: str) -> bool:
        """Return True if the ranks of `axis` hold different parts of the parameter, False if they hold copies."""
        return isinstance(self.parameter.axes.get(axis), Split)


def shard(
    parameter: Parameter,
    degrees: Mapping[str, int] | None = None,
    coordinates: Mapping[str, int] | None = None,
) -> ShardSpec:
    """Return the part of a parameter at `coordinates` of a mesh with these degrees.

    The parameter is cut along every axis that splits it. Without degrees the part is the complete parameter. Each
    degree must divide its dim, which `topology.plan` checks for every layer.
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
