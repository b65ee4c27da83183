"""Division of a rank's queries into contiguous stretches of the sequence, and the scores of a stretch.

With context parallelism a rank holds two chunks of the sequence, which need not be adjacent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from frontier_llm.comm import Axis
from frontier_llm.ops import Scores
from frontier_llm.topology.grid import held_positions


@dataclass(frozen=True)
class Query:
    """One contiguous stretch of this rank's tokens."""

    rows: slice  # their rows in this rank's tensors
    positions: range  # their positions in the sequence

    def scores(self, scores: Scores, keys: range) -> Scores:
        """Return the scores of these queries for the keys at the positions `keys`.

        The result has the offset between their positions in the sequence. `scores` has the document ids of the
        complete sequence.
        """
        documents_BK = scores.documents_BS
        if documents_BK is None:
            return replace(scores, offset=self.positions.start - keys.start)
        return replace(
            scores,
            offset=self.positions.start - keys.start,
            documents_BS=documents_BK[:, self.positions.start : self.positions.stop],
            key_documents_BK=documents_BK[:, keys.start : keys.stop],
        )


def queries_of(tokens: int, cp: Axis) -> Iterator[Query]:
    """Yield the stretches of this rank's `tokens` tokens, in the order of the sequence."""
    first = 0
    for positions in held_positions(tokens * cp.size, cp.size, cp.rank):
        yield Query(slice(first, first + len(positions)), positions)
        first += len(positions)
