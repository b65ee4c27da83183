"""Compares single vector and scalar instructions of the simulator with plain Python or exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.cdna2.arithmetic import fma
from tests.cdna2.operands import Unknown
from tests.unit.cdna2.machine import LANE, after, lanes

generator = np.random.default_rng(0)
EDGES = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -3.0,
        math.inf,
        -math.inf,
        math.nan,
        1e-45,
        -1e-40,
        2.0**-126,
        3.4e38,
        1e-20,
        7.0,
        2.0**-149,
        1e20,
        0.1,
    ],
    np.float32,
)


def floats(count=64):
    """Return random bits as float32, so that every exponent occurs."""
    return generator.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)


def same(got, expected):
    """Assert equal bits. Any NaN equals any NaN."""
    both_nan = np.isnan(got) & np.isnan(expected)
    assert np.array_equal(np.where(both_nan, 0, got), np.where(both_nan, 0, expected))
    assert np.array_equal(np.signbit(got[~both_nan]), np.signbit(expected[~both_nan]))


def rounded(exact):
    """Return the float32 nearest to a fraction, with ties to even."""
    near = np.float32(float(exact))
    if not np.isfinite(near):
        return near
    some = [np.nextafter(near, np.float32(-math.inf)), near, np.nextafter(near, np.float32(math.inf))]
    return min(
        (x for x in some if np.isfinite(x)), key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1)
    )


def test_fma_is_rounded_once():
    a = floats(4000)
    b = floats(4000)
    with np.errstate(all="ignore"):
        cancelling = -(a * b) * generator.choice([1, 1 + 2**-20, 0.5, 2**-24], 4000)
        c = np.where(np.arange(4000) % 3 == 0, floats(4000), cancelling).astype(np.float32)
        # Products whose last bit decides the rounding of the sum: rounding twice gives a wrong result.
        a[:3] = [1 + 2**-23, 1 + 2**-12, 1e-30]
        b[:3] = [1 + 2**-23, 1 + 2**-12, 1e-15]
        c[:3] = [2**-24, 2**-48, 1e-45]
        got = fma(a, b, c)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & np.isfinite(got) & (got != 0)
    assert finite.sum() > 1000
    for i in np.flatnonzero(finite):
        assert got[i] == rounded(Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))), (
            a[i],
            b[i],
            c[i],
        )


def test_fma_where_rounding_twice_is_wrong():
    # The product lies just above the midpoint between two neighbours of 1. In float64 the sum lies exactly on the
    # midpoint, so it would be rounded to even.
    a, b, c = (np.array([x], np.float32) for x in (2**-24 * (1 + 2**-23), 1 + 2**-23, 1.0))
    assert (a.astype(np.float64) * b + c).astype(np.float32)[0] == np.float32(1 + 2**-23)
    tiny = np.array([2.0**-60], np.float32)
    middle = np.array([1 + 2**-23], np.float32), np.array([2.0**-24], np.float32)
    assert fma(tiny, tiny, np.float32(1) * middle[0])[0] == middle[0][0]
    # 1 + 2^-24 exactly (a tie, to even: 1) plus 2^-80, which float64 drops
    one = fma(
        np.array([1 + 2.0**-12], np.float32), np.array([1 + 2.0**-12], np.float32), np.array([2.0**-11], np.float32)
    )
    assert one[0] == rounded((1 + Fraction(1, 2**12)) ** 2 + Fraction(1, 2**11))
    p, q, r = (np.array([x], np.float32) for x in (1 + 2.0**-23, 2.0**-24 * (1 - 2.0**-24), 1.0))
    assert fma(p, q, r)[0] == rounded(Fraction(float(p[0])) * Fraction(float(q[0])) + 1)


def test_fma_keeps_signs_and_infinities():
    nan = np.float32(math.nan)
    inf = np.float32(math.inf)
    a, b, c = (
        np.array(x, np.float32)
        for x in ([0, -0.0, inf, inf, 1, nan], [1, 1, 0, 1, inf, 1], [-0.0, -0.0, 1, -inf, 2, 1])
    )
    with np.errstate(all="ignore"):
        same(fma(a, b, c), np.array([0.0, -0.0, nan, nan, inf, nan], np.float32))


DIVISION = """v_div_scale_f32 v2, s[10:11], v1, v1, v0
v_div_scale_f32 v3, vcc, v0, v1, v0
v_rcp_f32_e32 v4, v2
v_fma_f32 v5, -v2, v4, 1.0
v_fma_f32 v4, v5, v4, v4
v_mul_f32_e32 v5, v3, v4
v_fma_f32 v6, -v2, v5, v3
v_fma_f32 v5, v6, v4, v5
v_fma_f32 v2, -v2, v5, v3
v_div_fmas_f32 v2, v2, v4, v5
v_div_fixup_f32 v2, v2, v1, v0"""


def test_llvms_division_is_ieees():
    numerators = np.concatenate([np.repeat(EDGES, len(EDGES)), floats(1024)])
    denominators = np.concatenate([np.tile(EDGES, len(EDGES)), floats(1024)])
    with np.errstate(all="ignore"):
        quotients = numerators / denominators
    for begin in range(0, len(numerators), 64):
        part = slice(begin, begin + 64)
        got = lanes(after(DIVISION, {0: numerators[part], 1: denominators[part]}), 2, np.float32)
        expected = quotients[part]
        tiny = np.abs(expected) < 2.0**-125  # results this small are rounded twice, because they are scaled back
        same(np.where(tiny, 0, got), np.where(tiny, 0, expected))
        assert (np.abs(got[tiny] - expected[tiny]) <= 2.0**-149).all()


def test_carries_make_64_bits():
    a, b = (generator.integers(0, 2**64, 64, dtype=np.uint64) for _ in range(2))
    a[:2] = [2**64 - 1, 2**32 - 1]
    b[:2] = [1, 1]
    low_a, low_b = (x.astype(np.uint32) for x in (a, b))
    high_a, high_b = ((x >> np.uint64(32)).astype(np.uint32) for x in (a, b))
    registers = {0: low_a, 1: high_a, 2: low_b, 3: high_b}
    state = after("v_add_co_u32_e32 v4, vcc, v0, v2\nv_addc_co_u32_e64 v5, s[2:3], v1, v3, vcc", registers)
    assert np.array_equal(lanes(state, 4) | lanes(state, 5).astype(np.uint64) << np.uint64(32), a + b)
    carry = [(int(x) + int(y)) >> 64 for x, y in zip(a, b, strict=True)]
    assert int(state.mask(2)[0]) == sum(bit << lane for lane, bit in enumerate(carry))
    state = after("v_sub_co_u32_e32 v4, vcc, v0, v2", registers)
    assert np.array_equal(lanes(state, 4), low_a - low_b)
    borrowed = int(state.mask(106)[0])
    assert borrowed == sum(int(x < y) << lane for lane, (x, y) in enumerate(zip(low_a, low_b, strict=True)))
    state = after("v_subrev_co_u32_e32 v4, vcc, v2, v0", registers)
    assert np.array_equal(lanes(state, 4), low_a - low_b) and int(state.mask(106)[0]) == borrowed
    state = after("v_min_u32_e32 v4, v0, v2\nv_min3_u32 v5, v4, v1, v3", registers)
    assert np.array_equal(lanes(state, 5), np.minimum(np.minimum(low_a, low_b), np.minimum(high_a, high_b)))


def test_64_bit_comparisons_and_products():
    a, b = (generator.integers(-(2**63), 2**63, 64) for _ in range(2))
    b[:8] = a[:8]
    words = {
        0: a.astype(np.uint32),
        1: (a >> 32).astype(np.uint32),
        2: b.astype(np.uint32),
        3: (b >> 32).astype(np.uint32),
    }
    expected = {
        "gt_i64": a > b,
        "le_i64": a <= b,
        "eq_u64": a == b,
        "ge_i64": a >= b,
        "lt_u64": a.view(np.uint64) < b.view(np.uint64),
    }
    for name, truth in expected.items():
        state = after(f"v_cmp_{name}_e32 vcc, v[0:1], v[2:3]", words, mask=LANE != 5)
        assert int(state.mask(106)[0]) == sum(1 << lane for lane in range(64) if truth[lane] and lane != 5)
    assert int(after("v_cmp_gt_i64_e64 s[2:3], v[0:1], -1", words).mask(2)[0]) == sum(
        1 << lane for lane in range(64) if a[lane] > -1
    )
    state = after("v_mad_i64_i32 v[4:5], s[2:3], v0, v2, v[0:1]", words)
    got = lanes(state, 4) | lanes(state, 5).astype(np.uint64) << np.uint64(32)
    x, y = (words[place].view(np.int32).astype(np.int64) for place in (0, 2))
    assert np.array_equal(got.view(np.int64), x * y + a)
    state = after("v_lshlrev_b64 v[4:5], 7, v[0:1]", words)
    assert np.array_equal(
        lanes(state, 4) | lanes(state, 5).astype(np.uint64) << np.uint64(32), a.view(np.uint64) << np.uint64(7)
    )


@pytest.mark.parametrize(
    ("name", "python"), [("lt", "<"), ("eq", "=="), ("gt", ">"), ("nlt", "not <"), ("ngt", "not >"), ("neq", "!=")]
)
def test_comparisons_with_nan(name, python):
    a = np.resize(EDGES, 64)
    b = np.resize(EDGES[::-1], 64)
    negated = python.startswith("not")
    operator = python.split()[-1]
    truth = [eval(f"a {operator} b", {"a": float(x), "b": float(y)}) != negated for x, y in zip(a, b, strict=True)]
    assert int(after(f"v_cmp_{name}_f32_e32 vcc, v0, v1", {0: a, 1: b}).mask(106)[0]) == sum(
        bit << lane for lane, bit in enumerate(truth)
    )
    unordered = int(after("v_cmp_u_f32_e64 s[2:3], v0, v0", {0: a}).mask(2)[0])
    assert unordered == sum(1 << lane for lane in range(64) if math.isnan(a[lane]))


@pytest.mark.parametrize(
    ("control", "source"),
    [
        ("row_shr:3", lambda i: i - 3 if i % 16 >= 3 else None),
        ("row_shl:1", lambda i: i + 1 if i % 16 < 15 else None),
        ("row_ror:8", lambda i: i // 16 * 16 + (i - 8) % 16),
        ("quad_perm:[3,2,1,0]", lambda i: i // 4 * 4 + 3 - i % 4),
        ("row_half_mirror", lambda i: i // 8 * 8 + 7 - i % 8),
        ("row_mirror", lambda i: i // 16 * 16 + 15 - i % 16),
        ("row_bcast:15", lambda i: i // 16 * 16 - 1 if i >= 16 else None),
        ("row_bcast:31", lambda i: 31 if i >= 32 else None),
        ("row_newbcast:4", lambda i: i // 16 * 16 + 4),
    ],
)
@pytest.mark.parametrize("bound", ["bound_ctrl:1", ""])
def test_lanes_read_other_lanes(control, source, bound):
    x = generator.integers(0, 2**32, 64, dtype=np.uint32)
    old = np.arange(64, dtype=np.uint32)
    off = 21
    text = f"v_mov_b32_dpp v1, v0 {control} row_mask:0xd bank_mask:0x7 {bound}"
    got = lanes(after(text, {0: x, 1: old}, mask=off != LANE), 1)
    for lane in range(64):
        written = lane // 16 != 1 and lane % 16 // 4 != 3 and lane != off
        there = source(lane) is not None and source(lane) != off
        if not written or (not there and not bound):
            assert got[lane] == old[lane]
        else:
            assert got[lane] == (x[source(lane)] if there else 0)


def test_parts_of_registers():
    x, y = (generator.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(2))
    text = "v_and_b32_sdwa v2, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_2"
    assert np.array_equal(lanes(after(text, {0: x, 1: y}), 2), (x >> 16) & (y >> 16 & 0xFF))
    text = "v_cvt_f32_f16_sdwa v2, v0 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1"
    same(lanes(after(text, {0: x}), 2, np.float32), (x >> 16).astype(np.uint16).view(np.float16).astype(np.float32))
    with pytest.raises(Unknown):
        after(text.replace("dst_sel:DWORD", "dst_sel:WORD_1"), {0: x})
    text = "v_or_b32_sdwa v2, v0, v1 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD"
    assert np.array_equal(lanes(after(text, {0: x, 1: y}), 2), (x | y) << 16)
    assert np.array_equal(lanes(after("v_lshlrev_b16_e32 v2, 8, v0", {0: x}), 2), (x & 0xFF) << 8)


def test_halves_are_rounded_to_the_nearest_even():
    values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65520, 65519.9, 2**-25, 2**-24, -1e-7, math.inf], np.float32)
    got = lanes(after("v_cvt_f16_f32_e32 v1, v0", {0: np.resize(values, 64)}), 1)[:8]
    assert list(got) == [0x3C00, 0x3C02, 0x7C00, 0x7BFF, 0, 1, 0x8002, 0x7C00]
    x = np.full(64, 0.1, np.float32)
    old = np.full(64, 0xAAAABBBB, np.uint32)
    half = int(np.float16(np.float32(0.1) * np.float32(3)).view(np.uint16))
    assert (
        lanes(after("v_fma_mixlo_f16 v1, v0, v2, neg(0)", {0: x, 1: old, 2: np.full(64, 3, np.float32)}), 1)[0]
        == 0xAAAA0000 | half
    )
    assert (
        lanes(after("v_fma_mixhi_f16 v1, v0, v2, neg(0)", {0: x, 1: old, 2: np.full(64, 3, np.float32)}), 1)[0]
        == half << 16 | 0xBBBB
    )
    pair = np.array([1.5, -2.0], np.float16).view(np.uint32)
    mixed = "v_fma_mix_f32 v1, -v0, v0, v2 op_sel:[1,0,0] op_sel_hi:[1,1,0]"
    assert (
        lanes(after(mixed, {0: np.repeat(pair, 64), 2: np.full(64, 0.25, np.float32)}), 1, np.float32)[0]
        == 2 * 1.5 + 0.25
    )


def test_packed_halves_and_their_selection():
    a = floats(64)
    b = floats(64)
    with np.errstate(all="ignore"):
        state = after(
            "v_pk_add_f32 v[4:5], v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[0,1] neg_hi:[0,1]",
            {0: a, 1: b, 2: b, 3: a},
        )
        same(lanes(state, 4, np.float32), b - b)
        same(lanes(state, 5, np.float32), a - a)
        state = after("v_pk_mul_f32 v[4:5], v[0:1], -0.5 op_sel_hi:[1,0]", {0: a, 1: b})
        same(lanes(state, 5, np.float32), b * np.float32(-0.5))
    swapped = after("v_pk_mov_b32 v[0:1], v[0:1], v[0:1] op_sel:[1,0]", {0: a, 1: b})  # overwrites its own inputs
    assert np.array_equal(lanes(swapped, 0), b.view(np.uint32)) and np.array_equal(lanes(swapped, 1), a.view(np.uint32))
    with pytest.raises(Unknown, match="high half"):
        after("v_pk_mul_f32 v[4:5], v[0:1], -0.5", {0: a, 1: b})


def test_bits():
    x, y, z = (generator.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(3))
    both = [int(a) << 32 | int(b) for a, b in zip(x, y, strict=True)]
    registers = {0: x, 1: y, 2: z}
    expected = {
        "v_perm_b32 v3, v0, v1, s2": [
            b >> 8 & 0xFF | (b >> 32 & 0xFF) << 8 | 0xFF << 16 | (0xFF if b >> 47 & 1 else 0) << 24 for b in both
        ],
        "v_bfe_u32 v3, v0, 5, 9": (x >> 5) & 511,
        "v_bfe_i32 v3, v0, 31, 1": np.where(x >> 31, 0xFFFFFFFF, 0),
        "v_bfi_b32 v3, v0, v1, v2": (x & y) | (~x & z),
        "v_xad_u32 v3, v0, v1, v2": (x ^ y) + z,
        "v_lshl_or_b32 v3, v0, 3, v1": x << 3 | y,
        "v_add3_u32 v3, v0, v1, v2": x + y + z,
        "v_mul_u32_u24_e32 v3, v0, v1": (x & 0xFFFFFF) * (y & 0xFFFFFF),
        "v_bfrev_b32_e32 v3, v0": [int(f"{a:032b}"[::-1], 2) for a in x],
        "v_ashrrev_i32_e32 v3, 4, v0": (x.view(np.int32) >> 4).view(np.uint32),
        "v_cndmask_b32_e64 v3, v0, v1, s[4:5]": np.where(LANE % 2, y, x),
        "v_subrev_u32_e32 v3, v0, v1": y - x,
    }
    for text, wanted in expected.items():
        state = after(text, registers, {2: 0x0A0D0401, 4: 0xAAAAAAAA, 5: 0xAAAAAAAA})
        assert np.array_equal(lanes(state, 3), np.asarray(wanted, np.uint32)), text


def test_conversions_saturate():
    values = np.array([-1.5, 2.9, 3e9, 5e9, math.nan, -math.inf, -3e9, 0.99], np.float32)
    unsigned = lanes(after("v_cvt_u32_f32_e32 v1, v0", {0: np.resize(values, 64)}), 1)[:8]
    assert list(unsigned) == [0, 2, 3000000000, 2**32 - 1, 0, 0, 0, 0]
    signed = lanes(after("v_cvt_i32_f32_e32 v1, v0", {0: np.resize(values, 64)}), 1, np.int32)[:8]
    assert list(signed) == [-1, 2, 2**31 - 1, 2**31 - 1, 0, -(2**31), -(2**31), 0]
    bits = np.full(64, 0x40302010, np.uint32)
    assert [lanes(after(f"v_cvt_f32_ubyte{i}_e32 v1, v0", {0: bits}), 1, np.float32)[0] for i in range(4)] == [
        16,
        32,
        48,
        64,
    ]
    assert lanes(after("v_exp_f32_e32 v1, v0", {0: np.full(64, -130, np.float32)}), 1, np.float32)[0] == 0  # flushed


def test_scalars_and_their_flag():
    cases = [
        ("s_add_u32 s2, s0, s1", 0xFFFFFFFF, 2, 1, True),
        ("s_sub_u32 s2, s0, s1", 1, 2, 0xFFFFFFFF, True),
        ("s_add_i32 s2, s0, s1", 0x7FFFFFFF, 1, 0x80000000, True),
        ("s_mul_hi_i32 s2, s0, s1", 0xFFFFFFFF, 2, 0xFFFFFFFF, None),
        ("s_ashr_i32 s2, s0, 31", 0x80000000, 0, 0xFFFFFFFF, True),
        ("s_abs_i32 s2, s0", 0xFFFFFFFB, 0, 5, True),
        ("s_bfe_u32 s2, s0, 0x10007", 0x80, 0, 1, True),
        ("s_brev_b32 s2, -2", 0, 0, 0x7FFFFFFF, None),
        ("s_bfe_i32 s2, s0, 0x1001b", 0x8000000, 0, 0xFFFFFFFF, True),
        ("s_bfe_i32 s2, s0, 0x40004", 0x75, 0, 7, True),
        ("s_bfe_i32 s2, s0, 0x200000", 0x80000000, 0, 0x80000000, True),
        ("s_bfe_i32 s2, s0, 0x0", 5, 0, 0, False),
        ("s_lshl2_add_u32 s2, s0, s1", 0x40000001, 3, 7, True),
        ("s_min_i32 s2, s0, s1", 0xFFFFFFFF, 1, 0xFFFFFFFF, True),
        ("s_movk_i32 s2, 0x8000", 0, 0, 0xFFFF8000, None),
        ("s_lshl4_add_u32 s2, s0, s1", 0x10000001, 3, 19, True),
        ("s_lshr_b64 s[2:3], s[0:1], 30", 0x80000000, 1, 6, True),
        ("s_lshl1_add_u32 s2, s0, s1", 0x80000001, 3, 5, True),
        ("s_lshl3_add_u32 s2, s0, s1", 1, 0xFFFFFFF9, 1, True),
        ("s_min_u32 s2, s0, s1", 0xFFFFFFFF, 1, 1, False),
        ("s_max_u32 s2, s0, s1", 0xFFFFFFFF, 1, 0xFFFFFFFF, True),
        ("s_absdiff_i32 s2, s0, s1", 0xFFFFFFFE, 3, 5, True),
        ("s_mov_b32 s2, s0\ns_mulk_i32 s2, 0xfffd", 7, 0, 0xFFFFFFEB, None),
        ("s_ashr_i64 s[2:3], s[0:1], 40", 0, 0x80000000, 0xFF800000, True),
        ("s_orn2_b32 s2, s0, s1", 1, 0xFFFFFFF0, 15, True),
        ("s_nand_b32 s2, s0, s1", 6, 0xFFFFFFFC, 0xFFFFFFFB, True),
        ("s_nor_b32 s2, s0, s1", 5, 0xFFFFFFF0, 10, True),
        ("s_xnor_b32 s2, s0, s1", 5, 0xFFFFFFFA, 0, False),
        ("s_not_b64 s[2:3], s[0:1]", 0xFFFFFFF0, 0xFFFFFFFF, 15, True),
        ("s_brev_b64 s[2:3], s[0:1]", 1, 2, 0x40000000, None),
        ("s_bfm_b32 s2, 5, 28", 0, 0, 0xF0000000, None),
        ("s_bfm_b64 s[2:3], s0, s1", 40, 4, 0xFFFFFFF0, None),
        ("s_bfe_u64 s[2:3], s[0:1], 0x100024", 0, 0xABCDE, 0xABCD, True),
        ("s_bfe_u64 s[2:3], s[0:1], 0x400000", 7, 0x80000000, 7, True),
        ("s_bfe_i64 s[2:3], s[0:1], 0x80024", 0, 0xF50, 0xFFFFFFF5, True),
        ("s_pack_ll_b32_b16 s2, s0, s1", 0x11112222, 0x33334444, 0x44442222, None),
        ("s_pack_lh_b32_b16 s2, s0, s1", 0x11112222, 0x33334444, 0x33332222, None),
        ("s_pack_hh_b32_b16 s2, s0, s1", 0x11112222, 0x33334444, 0x33331111, None),
        ("s_sext_i32_i8 s2, s0", 0x1280, 0, 0xFFFFFF80, None),
        ("s_sext_i32_i16 s2, s0", 0x18001, 0, 0xFFFF8001, None),
        ("s_bcnt0_i32_b32 s2, s0", 0xFFFFFFFF, 0, 0, False),
        ("s_bcnt1_i32_b64 s2, s[0:1]", 0xF0, 0x80000001, 6, True),
        ("s_ff0_i32_b32 s2, s0", 0x17, 0, 3, None),
        ("s_ff1_i32_b64 s2, s[0:1]", 0, 0x100, 40, None),
        ("s_ff1_i32_b32 s2, s0", 0, 0, 0xFFFFFFFF, None),
        ("s_flbit_i32_b32 s2, s0", 0x10000, 0, 15, None),
        ("s_flbit_i32_b64 s2, s[0:1]", 0xFFFFFFFF, 0x7FFFFFFF, 1, None),
        ("s_flbit_i32 s2, s0", 0xFFFF0000, 0, 16, None),
        ("s_flbit_i32_i64 s2, s[0:1]", 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, None),
        ("s_mov_b32 s2, s0\ns_bitset0_b32 s2, s1", 0xFF, 35, 0xF7, None),
        ("s_mov_b64 s[2:3], 0\ns_bitset1_b64 s[2:3], s1", 0, 67, 8, None),
        ("s_bitcmp1_b64 s[0:1], 33", 0, 2, 0, True),
        ("s_bitcmp0_b32 s0, s1", 4, 34, 0, False),
        ("s_cmpk_gt_u32 s0, 0xfffe", 0xFFFF, 0, 0, True),
        ("s_cmpk_gt_i32 s0, 0xfffe", 0xFFFFFFFF, 0, 0, True),
        ("s_cmp_eq_u32 s0, s1\ns_cmov_b32 s2, s0", 9, 9, 9, True),
        ("s_cmp_lg_u32 s0, s1\ns_cmov_b64 s[2:3], s[0:1]", 9, 9, 0, False),
        ("s_cmp_eq_u32 s0, s1\ns_cmovk_i32 s2, 0xffff", 9, 9, 0xFFFFFFFF, True),
    ]
    for text, first, second, expected, flag in cases:
        state = after(text, None, {0: first, 1: second, 2: 0, 3: 0})
        assert int(state.scalar[2, 0]) == expected and (flag is None or bool(state.scc[0]) is flag), text
    state = after(
        "s_and_saveexec_b64 s[2:3], s[0:1]\nv_mov_b32_e32 v1, 7",
        {1: np.zeros(64, np.uint32)},
        {0: 0xF0, 1: 0},
        mask=LANE < 6,
    )
    assert (
        int(state.mask(2)[0]) == 0x3F
        and int(state.mask(126)[0]) == 0x30
        and list(np.flatnonzero(lanes(state, 1))) == [4, 5]
    )
    for operation, mask in {"xor": 0xF0FFFFFFFFFFFFCF, "andn1": 0xF, "nor": 0x0F000000 << 32}.items():
        state = after(f"s_{operation}_saveexec_b64 s[2:3], s[0:1]", None, {0: 0xFFFFFFF0, 1: 0xF0FFFFFF}, mask=LANE < 6)
        assert int(state.mask(126)[0]) == mask, operation
    state = after("s_cmp_lt_i32 s0, 1\ns_cselect_b64 s[2:3], -1, 0", None, {0: 0xFFFFFFFF})
    assert int(state.mask(2)[0]) == 2**64 - 1
    state = after("v_readfirstlane_b32 s2, v0\nv_readlane_b32 s3, v0, 63", {0: LANE.astype(np.uint32)}, mask=LANE > 8)
    assert list(state.scalar[2:4, 0]) == [9, 63]


@pytest.mark.parametrize(
    "text",
    ["v_frobnicate_b32 v0, v1", "v_add_f32_e64 v0, v1, v2 clamp", "v_and_b32_e64 v0, -v1, v2", "v_mov_b32_e32 v60, v0",
     "v_add_f32_e64 v0, v1, v2 mul:2", "v_mov_b32_e32 v[0:1], v0", "v_mov_b32_dpp v0, v1 row_frob:1 " "row_mask:0xf " "bank_mask:0xf"],  # noqa: E501
)  # fmt: skip
def test_what_is_unknown_is_no_guess(text):
    with pytest.raises((Unknown, StopIteration)):
        after(text)
