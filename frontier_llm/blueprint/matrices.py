"""As which matrices an optimizer sees a parameter: q, k and v, gate and up, each expert by itself; decided by global
shapes, on any layout.

A fused weight must not be orthogonalised as one matrix: that couples what the model keeps apart, and where tensor
parallelism happened to cut it would then change the update (of keys and values by 95 %, Megatron-LM's pull request
7117).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from frontier_llm.blueprint.parameters import Parameter, ParameterKind, Piece, Split

NEWTON_SCHULZ_STEPS = 5  # of Muon's update


class Part(Enum):
    """What one rank of tp has of a matrix."""

    ALL = "all"
    LONG = "long"  # a part of its longer side: the product of the shorter sides is a sum over tp
    SHORT = "short"  # a part of its shorter side: it is gathered


@dataclass(frozen=True)
class Matrices:
    """Equal matrices that make one piece of a parameter; all figures are global."""

    piece: Piece | None  # None: all of it
    count: int
    rows: int
    columns: int
    split: int | None  # which of (count, rows, columns) is cut over tp; of experts over etp

    @property
    def transposed(self) -> bool:
        """Whether rows are the longer side; of a square the side that tp cuts counts as the longer one."""
        if self.rows == self.columns:
            return self.split == 1
        return self.rows > self.columns

    @property
    def short(self) -> int:
        """Entries of the shorter side."""
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        """Entries of the longer side."""
        return max(self.rows, self.columns)

    def part(self, tp: int) -> Part:
        """What one of `tp` ranks has of each."""
        if tp == 1 or self.split in (None, 0):
            return Part.ALL
        return Part.LONG if (self.split == 1) == self.transposed else Part.SHORT

    def on_rank(self, tp: int, ep: int = 1) -> tuple[int, int, int]:
        """(count, shorter side, longer side) of what one of `tp` ranks has, of experts that `ep` ranks share out."""
        part = self.part(tp)
        count = self.count // ep
        short = self.short
        long = self.long
        if self.split == 0:
            count //= tp
        if part is Part.SHORT:
            short //= tp
        if part is Part.LONG:
            long //= tp
        return count, short, long


def is_matrix(parameter: Parameter) -> bool:
    """Whether its pieces are linear maps between activations."""
    return parameter.kind not in (ParameterKind.EMBEDDING, ParameterKind.VECTOR)


def matrices_of(parameter: Parameter, by_group: bool = False) -> list[Matrices]:
    """The matrices of a parameter; `by_group`: one for each key/value head and its queries instead of one for all
    heads.
    """
    lead = int(parameter.kind is ParameterKind.EXPERTS or (by_group and parameter.grouped))
    how = parameter.axes.get(parameter.tensor_axis)
    last = len(parameter.shape) - 1
    split = None
    if isinstance(how, Split):
        split = int(how.dim >= lead) + int(how.dim >= last)
    result = []
    for piece in parameter.pieces or (None,):
        assert piece is None or not isinstance(how, Split) or piece.dim != how.dim, (
            f"{parameter.name}: tp cuts across its pieces"
        )
        shape = piece.shape_in(parameter.shape) if piece else parameter.shape
        result.append(Matrices(piece, prod(shape[:lead]), prod(shape[lead:last]), shape[last], split))
    return result
