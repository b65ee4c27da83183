"""Division of fused parameters into single matrices for optimizers such as Muon: q, k, v, gate, up, and each expert.

The matrices follow from global shapes, so they are the same on every layout. A fused weight must not be orthogonalised
as one matrix, because independent matrices would influence each other. The update would also depend on the
tensor-parallel degree: in Megatron-LM, the update of keys and values changed by 95 % (pull request 7117).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from frontier_llm.blueprint.parameters import Parameter, ParameterKind, Piece, Split

NEWTON_SCHULZ_STEPS = 5  # iterations in one update of Muon


class Part(Enum):
    """How tensor parallelism cuts a matrix: not at all, along its longer side, or along its shorter side."""

    ALL = "all"
    LONG = "long"  # The longer side is cut, so products that sum over this side are summed over tp.
    SHORT = "short"  # The shorter side is cut, so the matrix is gathered over tp.


@dataclass(frozen=True)
class Matrices:
    """Matrices of one shape that form one piece of a fused parameter. All sizes are sizes of complete matrices, without
    tensor parallelism.
    """

    piece: Piece | None  # None: the complete parameter
    count: int
    rows: int
    columns: int
    split: int | None  # index into (count, rows, columns) of the size that tp (for experts: etp) splits

    @property
    def transposed(self) -> bool:
        """True if there are more rows than columns.

        In a square matrix the side that tp splits counts as the longer one.
        """
        if self.rows == self.columns:
            return self.split == 1
        return self.rows > self.columns

    @property
    def short(self) -> int:
        """Length of the shorter side."""
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        """Length of the longer side."""
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
    """Return True if the parameter consists of matrices that multiply activations."""
    return parameter.kind not in (ParameterKind.EMBEDDING, ParameterKind.VECTOR)


def matrices_of(parameter: Parameter, by_group: bool = False) -> list[Matrices]:
    """Return the matrices of a parameter.

    With `by_group`, each of q, k and v has one matrix per key/value head instead of one for all heads. The matrix of q
    then holds the query heads of that key/value head.
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
