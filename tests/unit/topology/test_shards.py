"""A ShardSpec describes one rectangle; the rectangles of all tp ranks cover the parameter once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.topology import split, whole


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2), st.data())
def test_split_covers_every_element_once(tp_size: int, part: int, dim: int, data: st.DataObject) -> None:
    shape = [data.draw(st.integers(1, 4)) for _ in range(3)]
    shape[dim] = tp_size * part
    seen = np.zeros(shape, dtype=int)
    for tp_rank in range(tp_size):
        spec = split("w", tuple(shape), dim, tp_size, tp_rank, init_std=0.02)
        assert spec.counted and spec.numel == seen.size // tp_size
        seen[tuple(slice(start, start + size) for start, size in zip(spec.offset, spec.shape, strict=True))] += 1
    assert (seen == 1).all()


def test_an_uneven_split_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="w: 6 is not divisible by tp 4"):
        split("w", (6, 2), 0, 4, 0, init_std=None)


def test_whole_counts_once_and_sums_only_where_there_is_something_to_sum() -> None:
    specs = [whole("n", (8,), None, 1.0, tp_size=4, tp_rank=rank, sum_over_tp=True) for rank in range(4)]
    assert [spec.counted for spec in specs] == [True, False, False, False]
    assert all(spec.sum_over_tp and spec.shape == spec.global_shape == (8,) for spec in specs)
    assert not whole("n", (8,), None, sum_over_tp=True).sum_over_tp
