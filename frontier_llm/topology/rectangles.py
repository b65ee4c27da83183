"""Rectangles of global tensors: how ZeRO's flat runs become them, and how saved ones are cut to those that another
layout needs.

Everything here is arithmetic on tuples: no torch, no files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(frozen=True)
class Rectangle:
    """offset[d] ≤ index[d] < offset[d] + shape[d] in every dim of a global tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements inside."""
        return prod(self.shape)

    def shifted(self, by: tuple[int, ...]) -> Rectangle:
        """The same shape, moved."""
        return Rectangle(tuple(start + step for start, step in zip(self.offset, by, strict=True)), self.shape)

    def intersect(self, other: Rectangle) -> Rectangle | None:
        """What both have, or None."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Rectangle(offset, shape) if min(shape, default=1) > 0 else None

    def within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Indices of this rectangle in an array that holds `outer`."""
        starts = (mine - its for mine, its in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def rectangles_of_run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """Cut elements [start, stop) of a row-major array into rectangles, in flat order; each is contiguous in that array.

    At most 2 * dims - 1 of them: the end of a first row, whole rows, the start of a last row, and so on within those
    two rows.
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
    """(flat indices at which the runs of `part` start in a row-major array holding `outer`, i64; the elements of
    each run).
    """
    dims = len(outer.shape)
    if dims == 0:
        return np.zeros(1, np.int64), 1
    strides = [prod(outer.shape[dim + 1 :]) for dim in range(dims)]
    begin = [mine - its for mine, its in zip(part.offset, outer.offset, strict=True)]
    # dims after the last cut one are whole, so a run spans them and the cut dim itself
    cut = max((dim for dim in range(dims) if part.shape[dim] != outer.shape[dim]), default=0)
    starts = np.zeros(1, np.int64)
    for dim in range(cut):
        starts = (starts[:, None] + (np.arange(part.shape[dim]) + begin[dim]) * strides[dim]).ravel()
    return starts + begin[cut] * strides[cut], part.shape[cut] * strides[cut]


def spans(outer: Rectangle, part: Rectangle, merge_gap: int, limit: int) -> list[tuple[int, int]]:
    """Flat ranges of a row-major array holding `outer` that cover `part`, in order, each at most `limit` elements.

    Ranges closer than `merge_gap` elements are read as one: a short gap costs less than another read.
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
