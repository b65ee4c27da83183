"""What one rank writes and what one rank needs: rectangles of global tensors, and where they lie in its optimizer state.

Only weights' masters and the two Adam moments are stored. The working weights are cast(master) on every rank by construction
(`ops.adamw_` writes both), so storing them would add a fifth to a quarter to the bytes and nothing to the state; and so a checkpoint
does not depend on the working precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from frontier_llm.checkpoint.rectangles import Rectangle, rectangles_of_run
from frontier_llm.optim import Bucket, OwnedRange

KINDS = ("master", "exp_avg", "exp_avg_sq")  # fields of optim.BucketState, in the order in which a shard file holds them


@dataclass(frozen=True)
class Piece:
    """A rectangle of a global tensor that lies contiguously in this rank's optimizer state."""

    name: str
    global_shape: tuple[int, ...]
    rectangle: Rectangle
    bucket: int
    position: int  # of its first element in that bucket's BucketState tensors


def saved_pieces(buckets: Sequence[Bucket]) -> list[Piece]:
    """What this rank writes: of every counted parameter one of dp equal parts, with ZeRO or without, so that all ranks share the work."""
    pieces: list[Piece] = []
    for index, bucket in enumerate(buckets):
        size = bucket.weights.numel() // bucket.reduced.size
        start = size * bucket.reduced.rank
        # without ZeRO the state covers the whole bucket, with it only this share
        shift = start if bucket.owner.size == 1 else 0
        for run in bucket.ranges(start, start + size):
            if run.spec.counted:
                pieces.extend(_pieces_of(run, index, shift))
    return pieces


def needed_pieces(buckets: Sequence[Bucket]) -> list[Piece]:
    """What this rank's optimizer state is made of, replicas included."""
    return [piece for index, bucket in enumerate(buckets) for run in bucket.owned_ranges() for piece in _pieces_of(run, index, 0)]


def _pieces_of(run: OwnedRange, bucket: int, shift: int) -> Iterator[Piece]:
    position = shift + run.position
    for local in rectangles_of_run(run.spec.shape, run.start, run.stop):
        yield Piece(run.spec.name, run.spec.global_shape, local.shifted(run.spec.offset), bucket, position)
        position += local.numel
