"""Splits a rank's queries into groups of consecutive tokens, for context parallelism.

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
    """Consecutive tokens of this rank, whose queries are processed together."""

    rows: slice  # rows of these tokens in this rank's tensors
    positions: range  # positions of these tokens in the sequence

    def scores(self, scores: Scores, keys: range) -> Scores:
        """Return the score settings for these queries and for the keys at the positions `keys`.

        The result has the offset between the positions of queries and keys. `scores` has the document ids of the
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
    """Yield groups of consecutive tokens among this rank's `tokens` tokens, in the order of the sequence."""
    first = 0
    for positions in held_positions(tokens * cp.size, cp.size, cp.rank):
        yield Query(slice(first, first + len(positions)), positions)
        first += len(positions)
