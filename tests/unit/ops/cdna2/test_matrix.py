"""Matrix instructions against numpy's product, by the layout that AMD's matrix instruction calculator prints."""

import numpy as np
import pytest

from tests.unit.ops.cdna2.machine import after

generator = np.random.default_rng(0)


def bfloat(x):
    """float32 cut to bf16's bits."""
    return (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def halves(x, kind):
    return x.astype(np.float16).view(np.uint16) if kind == "f16" else bfloat(x)


def widened(bits, kind):
    return (
        bits.view(np.float16).astype(np.float64)
        if kind == "f16"
        else (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    )


def registers(bits, first):
    """A [32, 8] (or B transposed) as two registers: lane i + 32 h has row i, columns 4 h to 4 h + 3."""
    found = {}
    for register in (0, 1):
        found[first + register] = np.array(
            [int(bits[lane % 32, 4 * (lane // 32) + 2 * register]) | int(bits[lane % 32, 4 * (lane // 32) + 2 * register + 1]) << 16 for lane in range(64)],
            np.uint32,
        )  # fmt: skip
    return found


@pytest.mark.parametrize(("kind", "name"), [("f16", "v_mfma_f32_32x32x8f16"), ("bf16", "v_mfma_f32_32x32x8bf16_1k")])
@pytest.mark.parametrize("accumulated", [True, False])
def test_layout_and_product(kind, name, accumulated):
    a, b = (halves(generator.standard_normal((32, 8)), kind) for _ in range(2))
    c = generator.standard_normal((32, 32)).astype(np.float32)
    place = lambda register, lane: (8 * (register // 4) + 4 * (lane // 32) + register % 4, lane % 32)  # noqa: E731
    old = {8 + r: np.array([c[place(r, lane)] for lane in range(64)], np.float32) for r in range(16)}
    source = "v[8:23]" if accumulated else "0"
    state = after(f"{name} a[0:15], v[0:1], v[2:3], {source}", {**registers(a, 0), **registers(b, 2), **old}, mask=np.zeros(64, bool))
    expected = widened(a, kind) @ widened(b, kind).T + (c if accumulated else 0)
    got = np.empty((32, 32), np.float32)
    for r in range(16):
        for lane in range(64):
            got[place(r, lane)] = state.vector[32 + r, 0, lane : lane + 1].view(np.float32)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_subnormal_numbers_are_zeros():
    tiny = np.zeros((32, 8), np.uint16)
    tiny[0, 0] = 0x03FF  # the largest subnormal fp16
    other = np.zeros((32, 8), np.uint16)
    other[0, 0] = np.float16(1024).view(np.uint16)
    state = after("v_mfma_f32_32x32x8f16 v[8:23], v[0:1], v[2:3], 0", {**registers(tiny, 0), **registers(other, 2)})
    assert not state.vector[8:24].any()
    normal = np.where(tiny, np.uint16(0x0400), np.uint16(0))
    state = after("v_mfma_f32_32x32x8f16 v[8:23], v[0:1], v[2:3], 0", {**registers(normal, 0), **registers(other, 2)})
    assert state.vector[8, 0, :1].view(np.float32)[0] == np.float32(1024 * 2.0**-14)
    old = {8: np.full(64, 2.0**-127, np.float32), **{9 + r: np.zeros(64, np.float32) for r in range(15)}}
    assert (
        not after("v_mfma_f32_32x32x8f16 v[8:23], v[0:1], v[2:3], v[8:23]", {**dict.fromkeys(range(4), np.zeros(64, np.uint32)), **old})
        .vector[8:24]
        .any()
    )
