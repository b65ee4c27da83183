from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.topology.rectangles import (
    Rectangle,
    rectangles_of_run,
    spans,
)

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shapes, st.data())
def test_run_is_cut_into_contiguous_rectangles_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    flat = np.arange(prod(shape)).reshape(shape)
    whole = Rectangle((0,) * len(shape), shape)
    parts = list(rectangles_of_run(shape, start, stop))
    elements = [flat[part.within(whole)].ravel() for part in parts]
    assert np.array_equal(np.concatenate([*elements, np.empty(0, int)]), np.arange(start, stop))
    assert len(parts) <= 2 * len(shape) - 1
    assert all(part.numel == len(values) for part, values in zip(parts, elements, strict=True))


def test_whole_array_is_one_rectangle() -> None:
    assert list(rectangles_of_run((4, 3, 2), 0, 24)) == [Rectangle((0, 0, 0), (4, 3, 2))]
    assert list(rectangles_of_run((4, 6), 2, 21)) == [
        Rectangle((0, 2), (1, 4)),
        Rectangle((1, 0), (2, 6)),
        Rectangle((3, 0), (1, 3)),
    ]


@st.composite
def rectangle_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Rectangle:
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Rectangle(
        offset,
        tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, offset, strict=True)),
    )


@given(shapes, st.data())
def test_intersection_is_what_both_hold(shape: tuple[int, ...], data: st.DataObject) -> None:
    a = data.draw(rectangle_in(shape))
    b = data.draw(rectangle_in(shape))
    whole = Rectangle((0,) * len(shape), shape)
    masks = np.zeros((2, *shape), bool)
    masks[0][a.within(whole)] = True
    masks[1][b.within(whole)] = True
    common = a.intersect(b)
    both = masks.all(0)
    assert (common is not None) == both.any()
    if common is not None:
        assert both.sum() == common.numel and both[common.within(whole)].all()


@given(shapes, st.data(), st.integers(0, 6), st.integers(1, 20))
def test_spans_cover_the_part_and_little_else(
    shape: tuple[int, ...],
    data: st.DataObject,
    gap: int,
    limit: int,
) -> None:
    part = data.draw(rectangle_in(shape))
    whole = Rectangle((0,) * len(shape), shape)
    wanted = np.arange(prod(shape)).reshape(shape)[part.within(whole)].ravel()
    found = spans(whole, part, gap, limit)
    covered = np.concatenate([np.arange(*span) for span in found])
    assert np.isin(wanted, covered).all()
    assert all(0 < stop - start <= limit for start, stop in found)
    assert len(covered) == len(np.unique(covered))
    extra = np.diff(np.flatnonzero(np.isin(covered, wanted)))
    assert (extra <= gap + 1).all()
    assert covered[0] == wanted[0] and covered[-1] == wanted[-1]
