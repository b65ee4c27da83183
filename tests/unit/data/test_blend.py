"""Tests that a blend of datasets has exact proportions at every point of the run, computed directly for any sample
number k.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.data.blend import MAXIMUM_PERIOD, Blend, whole_weights
from frontier_llm.errors import DataError


def worst_error(blend: Blend, weights: list[Fraction], samples: int) -> Fraction:
    taken = [0] * len(weights)
    worst = Fraction(0)
    for k in range(samples):
        source, index = blend.locate(k)
        assert index == taken[source]  # each source's samples come in order, without a gap
        taken[source] += 1
        worst = max(worst, *(abs(taken[i] - (k + 1) * weight) for i, weight in enumerate(weights)))
    return worst


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
@settings(max_examples=80)
def test_off_by_less_than_one_sample(weights: list[int]) -> None:
    total = sum(weights)
    assert (
        worst_error(
            Blend(whole_weights(weights)),
            [Fraction(weight, total) for weight in weights],
            min(2 * total + 3, 400),
        )
        < 1
    )


@pytest.mark.thorough
@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=5))
@settings(max_examples=15)
def test_any_weights(weights: list[float]) -> None:
    total = sum(Fraction(weight) for weight in weights)
    exact = [Fraction(weight) / total for weight in weights]
    # rounding to 2^-22 moves a count by at most 300 * 2^-22 in 300 samples
    assert worst_error(Blend(whole_weights(weights)), exact, 300) < 1 + Fraction(300, MAXIMUM_PERIOD)


def test_decimals_mean_what_is_written() -> None:
    assert whole_weights([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert whole_weights([3, 5, 11]) == [3, 5, 11]
    assert whole_weights([2, 2]) == [1, 1]
    assert whole_weights([0.123456, 0.876544]) == [1929, 13696]


def test_long_weights_are_rounded_by_largest_remainder() -> None:
    whole = whole_weights([1 / 3, 2 / 3, 2**0.5])
    assert sum(whole) == MAXIMUM_PERIOD
    total = 1 + 2**0.5
    assert np.allclose(
        np.array(whole) / MAXIMUM_PERIOD,
        np.array([1 / 3, 2 / 3, 2**0.5]) / total,
        atol=2 / MAXIMUM_PERIOD,
        rtol=0,
    )


def test_far_samples_are_found_without_walking() -> None:
    blend = Blend([1, 2, 7])
    source, index = blend.locate(10**15)
    near = blend.locate(0)
    assert source == near[0]
    assert index == 10**14 * blend.counts[source]
    assert [blend.before(10**15 + 10, place) - blend.before(10**15, place) for place in range(3)] == [1, 2, 7]


@pytest.mark.parametrize("weights", [[], [0.5, 0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(DataError, match="positive numbers"):
        whole_weights(weights)


def test_weight_too_small() -> None:
    with pytest.raises(DataError, match="less than one sample"):
        whole_weights([1.0, 1e-9])
