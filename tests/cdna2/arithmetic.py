"""Floating point as the hardware does it, where numpy's own operators do something else."""

from __future__ import annotations

import numpy as np

from .state import Array

_SMALLEST = np.float32(2.0**-126)  # the smallest normal number


def flush(x: Array) -> Array:
    """float32 or float16 with subnormal numbers made zeros of their sign."""
    small = np.abs(x) < np.finfo(x.dtype).smallest_normal
    return np.where(small, np.copysign(x.dtype.type(0), x), x) if small.any() else x


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32, rounded once.

    The product is exact in float64, their sum is not: rounding it again errs where it lies on the middle between two
    float32, or where the result is subnormal. There the sum is first rounded to odd, after which the second rounding is
    right (Boldo and Melquiond, 2008).
    """
    product = a.astype(np.float64) * b
    addend = c.astype(np.float64)
    total = product + addend
    bits = total.view(np.int64)
    doubtful = (bits & 0x1FFFFFFF) == 0x10000000
    doubtful |= np.abs(total) < _SMALLEST
    if doubtful.any():
        back = total - product
        lost = (product - (total - back)) + (addend - back)
        away = (lost > 0) == (total > 0)
        bits += np.where(doubtful & (lost != 0) & (bits & 1 == 0) & np.isfinite(total), np.where(away, 1, -1), 0)
    return total.astype(np.float32)


def approximate(function: np.ufunc, x: Array) -> Array:
    """A transcendental instruction: within one unit in the last place on hardware, here the nearest; subnormal
    numbers are flushed.
    """
    return flush(function(flush(x).astype(np.float64)).astype(np.float32))


def to_integer(x: Array, kind: type[np.int32] | type[np.uint32]) -> Array:
    """Towards zero and saturating; NaN is 0."""
    limits = np.iinfo(kind)
    return np.clip(np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0), limits.min, limits.max).astype(kind)


def scale_exponent(x: Array, by: Array | int) -> Array:
    """x * 2**by, rounded once."""
    return np.ldexp(x.astype(np.float64), np.clip(by, -1000, 1000)).astype(np.float32)


def _exponent(x: Array) -> Array:
    """The exponent's field, 0 for zeros and subnormal numbers."""
    return (x.view(np.int32) >> 23) & 0xFF


def div_scale(x: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """x, which is one of the others, scaled such that their quotient can be refined; and whether the quotient must be
    scaled back.

    By the exponents, as GPUs do; AMD's pseudo-code asks whether quotients are subnormal, and would scale a large
    denominator up.
    """
    apart = _exponent(numerator) - _exponent(denominator)
    far_above = apart >= 96
    far_below = apart <= -96
    inverse_small = _exponent(denominator) >= 253
    tiny = (_exponent(denominator) == 0) | (_exponent(numerator) <= 23)
    up = scale_exponent(x, 64)
    down = scale_exponent(x, -64)
    is_denominator = x == denominator
    is_numerator = x == numerator
    cases = [
        (numerator == 0) | (denominator == 0),
        far_above,
        far_below & inverse_small,
        far_below,
        inverse_small,
        tiny,
    ]
    scaled = [
        np.full_like(up, np.nan),
        np.where(is_denominator, up, x),
        np.where(is_denominator, down, x),
        np.where(is_numerator, up, x),
        down,
        up,
    ]
    return np.select(cases, scaled, x), far_above | far_below


def div_fmas(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    """The last refinement of a quotient, and the scaling back."""
    result = fma(a, b, c)
    return np.where(scaled, scale_exponent(result, np.where(_exponent(c) > 127, 64, -64)), result)


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The refined quotient, or what IEEE 754 says for operands that cannot be refined."""
    sign = np.where(np.signbit(denominator) != np.signbit(numerator), np.float32(-1), np.float32(1))
    apart = _exponent(numerator) - _exponent(denominator)
    both_zero = (numerator == 0) & (denominator == 0)
    both_infinite = np.isinf(numerator) & np.isinf(denominator)
    infinity = sign * np.float32(np.inf)
    zero = sign * np.float32(0)
    cases = [
        np.isnan(numerator), np.isnan(denominator), both_zero | both_infinite, (denominator == 0) | np.isinf(numerator),
        np.isinf(denominator) | (numerator == 0), apart < -150, np.isnan(quotient),
    ]  # fmt: skip
    nan = np.float32(np.nan)
    return np.select(cases, [numerator, denominator, nan, infinity, zero, zero, infinity], sign * np.abs(quotient))
