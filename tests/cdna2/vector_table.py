"""Tables of the functions that vector instructions compute on each lane, by mnemonic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from .arithmetic import approximate, div_fixup, fma, scale_exponent, to_integer
from .scalar import reverse_bits
from .state import Array


@dataclass(frozen=True)
class Vector:
    """The number kinds of result and sources of an instruction, and its function. The source "dst" is the old value of
    the result's register.
    """

    result: str
    sources: tuple[str, ...]
    function: Callable[..., Any]


def _op(kinds: str, function: Callable[..., Any]) -> Vector:
    result, _, sources = kinds.partition("=")
    return Vector(result.strip(), tuple(sources.split()), function)


def _shifted(function: Callable[[Array, Array], Array], bits: int) -> Callable[[Array, Array], Array]:
    """Return a shift whose first operand is the distance (the v_*rev_* instructions)."""
    return lambda by, x: function(x, (by & (bits - 1)).astype(x.dtype))


def _low_24(a: Array, b: Array) -> Array:
    return (a & 0xFFFFFF) * (b & 0xFFFFFF)


def _unsigned_field(x: Array, first: Array, width: Array) -> Array:
    return (x >> (first & 31)) & ((np.uint32(1) << (width & 31)) - np.uint32(1))


def _signed_field(x: Array, first: Array, width: Array) -> Array:
    keep = width & 31
    sign = np.where(keep == 0, np.uint32(0), np.uint32(1) << ((keep - np.uint32(1)) & 31))
    return (_unsigned_field(x, first, width) ^ sign) - sign


def _permute(high: Array, low: Array, selector: Array) -> Array:
    """v_perm_b32. Each byte of the selector selects one of eight input bytes, a repeated sign bit, 0 or 0xff."""
    both = high.astype(np.uint64) << np.uint64(32) | low
    result: Any = np.zeros((1, 1), np.uint64)
    for place in range(0, 32, 8):
        which = (selector >> np.uint32(place) & 0xFF).astype(np.uint64)
        byte = both >> (np.uint64(8) * (which & np.uint64(7))) & np.uint64(0xFF)
        sign = (both >> (np.uint64(16) * (which & np.uint64(3)) + np.uint64(15)) & np.uint64(1)) * np.uint64(0xFF)
        byte = np.where(
            which < 8, byte, np.where(which < 12, sign, np.where(which == 12, np.uint64(0), np.uint64(0xFF)))
        )
        result = result | byte << np.uint64(place)
    return np.asarray(result)


def _byte(place: int, x: Array) -> Array:
    return x >> np.uint32(8 * place) & np.uint32(0xFF)


def _pack(low: Array, high: Array) -> Array:
    return low.view(np.uint16).astype(np.uint32) | high.view(np.uint16).astype(np.uint32) << np.uint32(16)


_U2 = "u32 = u32 u32"
_I2 = "i32 = i32 i32"
_F2 = "f32 = f32 f32"
_U3 = "u32 = u32 u32 u32"
_F3 = "f32 = f32 f32 f32"
TABLE: Final[dict[str, Vector]] = {
    "v_mov_b32": _op("u32 = u32", lambda a: a),
    "v_accvgpr_read_b32": _op("u32 = u32", lambda a: a),
    "v_accvgpr_write_b32": _op("u32 = u32", lambda a: a),
    "v_accvgpr_mov_b32": _op("u32 = u32", lambda a: a),
    "v_not_b32": _op("u32 = u32", np.invert),
    "v_bfrev_b32": _op("u32 = u32", reverse_bits),
    "v_and_b32": _op(_U2, np.bitwise_and),
    "v_or_b32": _op(_U2, np.bitwise_or),
    "v_xor_b32": _op(_U2, np.bitwise_xor),
    "v_add_u32": _op(_U2, np.add),
    "v_sub_u32": _op(_U2, np.subtract),
    "v_subrev_u32": _op(_U2, lambda a, b: b - a),
    "v_mul_u32_u24": _op(_U2, _low_24),
    "v_mul_lo_u32": _op(_U2, np.multiply),
    "v_mul_hi_u32": _op(_U2, lambda a, b: (a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)),
    "v_max_i32": _op(_I2, np.maximum),
    "v_min_i32": _op(_I2, np.minimum),
    "v_min_u32": _op(_U2, np.minimum),
    "v_min3_u32": _op(_U3, lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_lshlrev_b32": _op(_U2, _shifted(np.left_shift, 32)),
    "v_lshrrev_b32": _op(_U2, _shifted(np.right_shift, 32)),
    "v_ashrrev_i32": _op(_I2, _shifted(np.right_shift, 32)),
    "v_lshlrev_b64": _op("u64 = u32 u64", _shifted(np.left_shift, 64)),
    "v_lshlrev_b16": _op(_U2, lambda by, x: (x & 0xFFFF) << (by & 15) & 0xFFFF),  # the upper half is set to 0
    "v_add3_u32": _op(_U3, lambda a, b, c: a + b + c),
    "v_xad_u32": _op(_U3, lambda a, b, c: (a ^ b) + c),
    "v_or3_b32": _op(_U3, lambda a, b, c: a | b | c),
    "v_and_or_b32": _op(_U3, lambda a, b, c: a & b | c),
    "v_lshl_or_b32": _op(_U3, lambda a, b, c: a << (b & 31) | c),
    "v_lshl_add_u32": _op(_U3, lambda a, b, c: (a << (b & 31)) + c),
    "v_add_lshl_u32": _op(_U3, lambda a, b, c: (a + b) << (c & 31)),
    "v_bfi_b32": _op(_U3, lambda mask, a, b: mask & a | ~mask & b),
    "v_bfe_u32": _op(_U3, _unsigned_field),
    "v_bfe_i32": _op(_U3, _signed_field),
    "v_perm_b32": _op(_U3, _permute),
    "v_pack_b32_f16": _op("u32 = f16 f16", _pack),
    "v_add_f32": _op(_F2, np.add),
    "v_sub_f32": _op(_F2, np.subtract),
    "v_subrev_f32": _op(_F2, lambda a, b: b - a),
    "v_mul_f32": _op(_F2, np.multiply),
    "v_max_f32": _op(_F2, np.fmax),
    "v_min_f32": _op(_F2, np.fmin),
    "v_max3_f32": _op(_F3, lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "v_fma_f32": _op(_F3, fma),
    "v_fmac_f32": _op("f32 = dst f32 f32", lambda c, a, b: fma(a, b, c)),
    "v_add_f16": _op("f16 = f16 f16", np.add),
    "v_add_f64": _op("f64 = f64 f64", np.add),
    "v_exp_f32": _op("f32 = f32", partial(approximate, np.exp2)),
    "v_log_f32": _op("f32 = f32", partial(approximate, np.log2)),
    "v_rcp_f32": _op("f32 = f32", partial(approximate, np.reciprocal)),
    "v_sqrt_f32": _op("f32 = f32", partial(approximate, np.sqrt)),
    "v_rndne_f32": _op("f32 = f32", np.rint),
    "v_ldexp_f32": _op("f32 = f32 i32", scale_exponent),
    "v_div_fixup_f32": _op(_F3, div_fixup),
    "v_cvt_f16_f32": _op("f16 = f32", lambda a: a),
    "v_cvt_f32_f16": _op("f32 = f16", lambda a: a),
    "v_cvt_f64_f32": _op("f64 = f32", lambda a: a),
    "v_cvt_f32_i32": _op("f32 = i32", lambda a: a),
    "v_cvt_f32_u32": _op("f32 = u32", lambda a: a),
    **{f"v_cvt_f32_ubyte{place}": _op("f32 = u32", partial(_byte, place)) for place in range(4)},
    "v_cvt_i32_f32": _op("i32 = f32", lambda a: to_integer(a, np.int32)),
    "v_cvt_u32_f32": _op("u32 = f32", lambda a: to_integer(a, np.uint32)),
}
_Predicate = Callable[..., Any]
_ORDERED: Final[dict[str, _Predicate]] = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
COMPARE: Final[dict[str, tuple[str, _Predicate]]] = {}
for _kind in ("i32", "u32", "i64", "u64"):
    COMPARE.update({f"v_cmp_{name}_{_kind}": (_kind, compare) for name, compare in _ORDERED.items()})
    COMPARE[f"v_cmp_ne_{_kind}"] = _kind, np.not_equal
for _kind in ("f32", "f64"):
    for _name, _compare in _ORDERED.items():
        COMPARE[f"v_cmp_{_name}_{_kind}"] = _kind, _compare
        COMPARE[f"v_cmp_n{_name}_{_kind}"] = _kind, lambda a, b, compare=_compare: ~compare(a, b)
    COMPARE[f"v_cmp_o_{_kind}"] = _kind, lambda a, b: ~(np.isnan(a) | np.isnan(b))
    COMPARE[f"v_cmp_u_{_kind}"] = _kind, lambda a, b: np.isnan(a) | np.isnan(b)
    COMPARE[f"v_cmp_lg_{_kind}"] = _kind, lambda a, b: (a < b) | (a > b)
    COMPARE[f"v_cmp_nlg_{_kind}"] = _kind, lambda a, b: ~((a < b) | (a > b))

# v_pk_*: the function is applied to two values, in two registers (f32) or in the halves of one register (f16)
PACKED: Final[dict[str, tuple[str, Callable[..., Any]]]] = {
    "v_pk_add_f32": ("f32", np.add),
    "v_pk_mul_f32": ("f32", np.multiply),
    "v_pk_fma_f32": ("f32", fma),
    "v_pk_add_f16": ("f16", np.add),
    "v_pk_mul_f16": ("f16", np.multiply),
}
