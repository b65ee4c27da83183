"""Floating-point operations of gfx90a whose results differ from numpy's operators."""

from __future__ import annotations

import numpy as np

from .state import Array

_SMALLEST = np.float32(2.0**-126)  # the smallest normal number


def flush(x: Array) -> Array:
    """Return x (float32 or float16) with each subnormal number replaced by a zero of the same sign."""
    small = np.abs(x) < np.finfo(x.dtype).smallest_normal
    return np.where(small, np.copysign(x.dtype.type(0), x), x) if small.any() else x


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of float32, rounded once.

    In float64 the product is exact, but its sum with c is not. Rounding the sum again to float32 is wrong if the sum is
    halfway between two float32 numbers, or if the result is subnormal. In these cases the sum is first rounded to odd,
    after which the second rounding is right (Boldo and Melquiond, 2008).
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
    """Execute a transcendental instruction, rounded to the nearest number. Subnormal numbers are flushed. Hardware
    errs by up to one unit in the last place.
    """
    return flush(function(flush(x).astype(np.float64)).astype(np.float32))


def to_integer(x: Array, kind: type[np.int32] | type[np.uint32]) -> Array:
    """Convert to integers: rounded towards zero and saturated. NaN becomes 0."""
    limits = np.iinfo(kind)
    return np.clip(np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0), limits.min, limits.max).astype(kind)


def scale_exponent(x: Array, by: Array | int) -> Array:
    """Return x * 2**by, rounded once."""
    return np.ldexp(x.astype(np.float64), np.clip(by, -1000, 1000)).astype(np.float32)


def _exponent(x: Array) -> Array:
    """Return the 8 exponent bits. They are 0 for zeros and subnormal numbers."""
    return (x.view(np.int32) >> 23) & 0xFF


def div_scale(x: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """v_div_scale: return x, scaled so that the quotient can be refined, and whether to scale the quotient back.

    x is the numerator or the denominator. This function decides by the exponents, as GPUs do. AMD's pseudo-code instead
    tests whether quotients are subnormal. It would scale a large denominator up.
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
    """v_div_fmas: refine a quotient for the last time, and undo its scaling."""
    result = fma(a, b, c)
    return np.where(scaled, scale_exponent(result, np.where(_exponent(c) > 127, 64, -64)), result)


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """v_div_fixup: return the refined quotient, or IEEE 754's result for zeros, infinities and NaN."""
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
