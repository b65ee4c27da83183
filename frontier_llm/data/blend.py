"""Blends: which source gives sample k of the run, and which of its samples, as a pure function of k.

After any n samples each source has given n * weight samples, off by less than one. Weights become whole numbers over a common
period; one period is laid out by the compiled scheduler (csrc/sample_index.cpp, fl_blend) and then repeats, so any k is found at
once. Weights whose common denominator is at most 2^22 (0.7/0.2/0.1; 3:5:11; six decimals) are exact; others are rounded to
multiples of 2^-22, which shifts a source by less than one sample in four million.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from frontier_llm.data.native import call
from frontier_llm.errors import DataError

MAXIMUM_PERIOD = 1 << 22
MAXIMUM_SOURCES = 1 << 16


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportion of `weights`, summing to at most 2^22.

    Decimals mean what is written (0.1 is one tenth). Raises DataError for a weight that is not a positive number, or one too
    small beside the others to be given a sample in four million.
    """
    bad = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    if bad or not weights:
        raise DataError(f"blend weights must be positive numbers, found {list(weights)}", fix="remove the source, or give it a weight > 0")
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
        what = f"weight {weights[source]} is less than one sample in {2 * MAXIMUM_PERIOD} of the blend"
        raise DataError(what, fix="leave the source out, or give it more weight")
    return rounded


class Blend:
    """`locate(k)` of a blend of sources with the given weights."""

    def __init__(self, weights: Sequence[float]) -> None:
        if len(weights) > MAXIMUM_SOURCES:
            raise DataError(f"{len(weights)} sources in one blend", fix=f"join datasets; at most {MAXIMUM_SOURCES}")
        self.counts = whole_weights(weights)  # samples of each source per period
        self.period = sum(self.counts)
        self._source = np.empty(self.period, np.uint16)
        call("fl_blend", np.array(self.counts, np.uint64), len(self.counts), self.period, self._source)
        self._rank = np.empty(self.period, np.uint32)  # how often the slot's source was taken before, within the period
        for source, count in enumerate(self.counts):
            self._rank[self._source == source] = np.arange(count, dtype=np.uint32)

    def locate(self, k: int) -> tuple[int, int]:
        """(source, index within that source) of sample k."""
        cycle, slot = divmod(k, self.period)
        source = int(self._source[slot])
        return source, cycle * self.counts[source] + int(self._rank[slot])
