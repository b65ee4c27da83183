"""Rectangles of global tensors. The module converts ZeRO's ranges of flat elements to rectangles, and intersects saved
rectangles with the rectangles that another layout needs.

The module computes with tuples and numpy arrays. It uses neither torch nor files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(frozen=True)
class Rectangle:
    """The elements of a global tensor with offset[d] ≤ index[d] < offset[d] + shape[d] in every dim d."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def shifted(self, by: tuple[int, ...]) -> Rectangle:
        """Return the rectangle with `by` added to its offset."""
        return Rectangle(tuple(start + step for start, step in zip(self.offset, by, strict=True)), self.shape)

    def intersect(self, other: Rectangle) -> Rectangle | None:
        """Return the elements that both rectangles contain, or None if there are none."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Rectangle(offset, shape) if min(shape, default=1) > 0 else None

    def within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Return the slices that select this rectangle in an array that holds the elements of `outer`."""
        starts = (mine - its for mine, its in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def rectangles_of_run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """Yield rectangles that together have elements [start, stop) of a row-major array of this shape, in order.

    Each rectangle is contiguous in the array. There are at most 2 * dims - 1 rectangles: the end of the first row, the
    complete rows and the start of the last row. The incomplete first and last rows are divided into rectangles by the
    same rule.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Rectangle((start,) if shape else (), (stop - start,) if shape else ())
        return
    inner = prod(shape[1:])
    zeros = (0,) * (len(shape) - 1)
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if head:
        yield from _in_row(shape, first, head, tail if first == last else inner)
        first += 1
    if first < last:
        yield Rectangle((first, *zeros), (last - first, *shape[1:]))
    if tail and first <= last:
        yield from _in_row(shape, last, 0, tail)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Rectangle]:
    for part in rectangles_of_run(shape[1:], start, stop):
        yield Rectangle((row, *part.offset), (1, *part.shape))


def contiguous_runs(outer: Rectangle, part: Rectangle) -> tuple[np.ndarray, int]:
    """Return the contiguous runs of `part` in a row-major array that holds `outer`.

    The first value holds the flat indices at which the runs start (int64). The second is the length of each run in
    elements.
    """
    dims = len(outer.shape)
    if dims == 0:
        return np.zeros(1, np.int64), 1
    strides = [prod(outer.shape[dim + 1 :]) for dim in range(dims)]
    begin = [mine - its for mine, its in zip(part.offset, outer.offset, strict=True)]
    # `cut` is the last dim that `part` does not cover completely; a contiguous run covers this dim and all later dims
    cut = max((dim for dim in range(dims) if part.shape[dim] != outer.shape[dim]), default=0)
    starts = np.zeros(1, np.int64)
    for dim in range(cut):
        starts = (starts[:, None] + (np.arange(part.shape[dim]) + begin[dim]) * strides[dim]).ravel()
    return starts + begin[cut] * strides[cut], part.shape[cut] * strides[cut]


def spans(outer: Rectangle, part: Rectangle, merge_gap: int, limit: int) -> list[tuple[int, int]]:
    """Return flat ranges (start, stop) that cover `part` in a row-major array that holds `outer`.

    The ranges are in order, and each has at most `limit` elements. Gaps of at most `merge_gap` elements are read too,
    because a short gap costs less than another read.
    """
    starts, run = contiguous_runs(outer, part)
    breaks = np.flatnonzero(np.diff(starts) - run > merge_gap) + 1
    firsts = starts[np.r_[0, breaks]]
    lasts = starts[np.r_[breaks - 1, len(starts) - 1]] + run
    return [
        (position, min(position + limit, last))
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
        for position in range(first, last, limit)
    ]
