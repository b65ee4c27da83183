"""Assigns the samples of a run to the datasets of a blend (its sources). The source of sample k, and the index in that
source, are a pure function of k.

After n samples of the blend, n * weight of them came from each source, with an error of less than one sample. Weights
are converted to integers. Their sum is the period of the blend. The compiled scheduler (csrc/sample_index.cpp,
fl_blend) assigns the samples of one period. This assignment then repeats, so the source of any k is found in constant
time.

Weights with a common denominator of at most 2^22 are exact (0.7/0.2/0.1; 3:5:11; six decimals). Other weights are
rounded to multiples of 2^-22. This changes a source by less than one sample in four million.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from frontier_llm.data.native import call
from frontier_llm.errors import DataError

MAXIMUM_PERIOD = 1 << 22
MAXIMUM_SOURCES = 1 << 16


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the proportion of `weights`, with a sum of at most 2^22.

    A decimal has exactly its written value (0.1 is one tenth). Raises DataError for a weight that is not a positive
    number. The same error is raised for a weight that is too small, relative to the other weights, to get a sample.
    """
    bad = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    if bad or not weights:
        raise DataError(
            f"blend weights must be positive numbers, found {list(weights)}",
            fix="give each source a weight above 0, or remove it",
        )
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    divisor = math.gcd(*whole)
    whole = [number // divisor for number in whole]
    if sum(whole) <= MAXIMUM_PERIOD:
        return whole
    total = sum(whole)
    shares = [Fraction(number * MAXIMUM_PERIOD, total) for number in whole]
    rounded = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (rounded[i] - shares[i], i))
    for source in by_remainder[: MAXIMUM_PERIOD - sum(rounded)]:
        rounded[source] += 1
    if 0 in rounded:
        source = rounded.index(0)
        what = f"weight {weights[source]} is too small: it is less than one sample in {2 * MAXIMUM_PERIOD} of the blend"
        raise DataError(what, fix="remove the source, or increase its weight")
    return rounded


class Blend:
    """Maps sample k of a blend to its source, for integer weights (`whole_weights`)."""

    def __init__(self, counts: Sequence[int]) -> None:
        """`counts`: samples of each source per period."""
        if len(counts) > MAXIMUM_SOURCES:
            raise DataError(
                f"{len(counts)} sources in one blend, more than {MAXIMUM_SOURCES}", fix="join some of the datasets"
            )
        self.counts = tuple(counts)
        self.period = sum(counts)
        self._source = np.zeros(self.period, np.uint16)
        if len(counts) > 1:
            call("fl_blend", np.array(self.counts, np.uint64), len(self.counts), self.period, self._source)
        # One array per source: the positions of its samples in the period, in ascending order.
        self._slots = [np.flatnonzero(self._source == source).astype(np.uint32) for source in range(len(counts))]

    def before(self, k: int, source: int) -> int:
        """Return the number of samples of one source among the first k of the blend."""
        cycle, slot = divmod(k, self.period)
        return cycle * self.counts[source] + int(np.searchsorted(self._slots[source], slot))

    def locate(self, k: int) -> tuple[int, int]:
        """Return (source, index within that source) of sample k."""
        source = int(self._source[k % self.period])
        return source, self.before(k, source)


# cached by tuple of integer weights; each blend takes 6 bytes per slot of its period
blend_of = functools.lru_cache(maxsize=8)(Blend)
