"""A rank's queries in the stretches of the sequence that they come from, and what each stretch may see of a stretch
of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from frontier_llm.comm import Axis
from frontier_llm.ops import Scores
from frontier_llm.topology.grid import held_positions


@dataclass(frozen=True)
class Query:
    """One stretch of this rank's tokens."""

    rows: slice  # of this rank's tensors
    positions: range  # in the sequence

    def scores(self, scores: Scores, keys: range) -> Scores:
        """How these queries score the keys at the positions `keys`, by true position; the documents of `scores` are
        the whole sequence's.
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
    """The stretches of this rank's `tokens` tokens, in the order of the sequence."""
    first = 0
    for positions in held_positions(tokens * cp.size, cp.size, cp.rank):
        yield Query(slice(first, first + len(positions)), positions)
        first += len(positions)
