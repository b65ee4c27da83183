"""The matrices of which a parameter consists for an optimizer: q, k and v, gate and up, and each expert separately.

The matrices follow from global shapes, so they are the same on every layout. A fused weight must not be orthogonalised
as one matrix, because that couples independent matrices. The update would also depend on the cut of tensor parallelism:
the update of keys and values changed by 95 % (Megatron-LM's pull request 7117).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from frontier_llm.blueprint.parameters import Parameter, ParameterKind, Piece, Split

NEWTON_SCHULZ_STEPS = 5  # in one update of Muon


class Part(Enum):
    """The part of a matrix that one tp rank holds."""

    ALL = "all"
    LONG = "long"  # The longer side is cut, so the product over it is summed over tp.
    SHORT = "short"  # The shorter side is cut, so the matrix is gathered over tp.


@dataclass(frozen=True)
class Matrices:
    """Matrices of one shape that form one piece of a parameter. All sizes are global."""

    piece: Piece | None  # None: the complete parameter
    count: int
    rows: int
    columns: int
    split: int | None  # index into (count, rows, columns) of the size that is cut over tp (experts: etp)

    @property
    def transposed(self) -> bool:
        """True if rows are the longer side. In a square matrix the side that tp cuts counts as the longer one."""
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
        """Return the part of each matrix that one of `tp` ranks holds."""
        if tp == 1 or self.split in (None, 0):
            return Part.ALL
        return Part.LONG if (self.split == 1) == self.transposed else Part.SHORT

    def on_rank(self, tp: int, ep: int = 1) -> tuple[int, int, int]:
        """Return (count, shorter side, longer side) of the matrices on one of `tp` ranks.

        `ep` is the number of ranks over which experts are distributed.
        """
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
    """Return True if the pieces of the parameter are linear maps between activations."""
    return parameter.kind not in (ParameterKind.EMBEDDING, ParameterKind.VECTOR)


def matrices_of(parameter: Parameter, by_group: bool = False) -> list[Matrices]:
    """Return the matrices of a parameter.

    With `by_group`, q, k and v have one matrix per key/value head, with its queries, instead of one for all heads.
    """
    leading = int(parameter.kind is ParameterKind.EXPERTS or (by_group and parameter.grouped))
    how = parameter.axes.get(parameter.tensor_axis)
    last = len(parameter.shape) - 1
    split = None
    if isinstance(how, Split):
        split = int(how.dim >= leading) + int(how.dim >= last)
    result = []
    for piece in parameter.pieces or (None,):
        assert piece is None or not isinstance(how, Split) or piece.dim != how.dim, (
            f"{parameter.name}: tp splits the dimension of its pieces"
        )
        shape = piece.shape_in(parameter.shape) if piece else parameter.shape
        result.append(Matrices(piece, prod(shape[:leading]), prod(shape[leading:last]), shape[last], split))
    return result
