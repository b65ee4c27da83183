"""Compares matrix instructions with numpy's product, in the register layout that AMD's matrix instruction calculator
prints.
"""

import numpy as np
import pytest

from tests.unit.cdna2.machine import after

generator = np.random.default_rng(0)


def bfloat(x):
    """Truncate float32 to the bits of bf16."""
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
    """Return A (or B transposed) as two registers. Lane i + size h holds row i, columns 4 h to 4 h + 3."""
    size = len(bits)
    found = {}
    for register in (0, 1):
        pairs = [bits[lane % size, 4 * (lane // size) + 2 * register :][:2].astype(np.uint32) for lane in range(64)]
        found[first + register] = np.array([low | high << 16 for low, high in pairs], np.uint32)
    return found


@pytest.mark.parametrize("shape", [(32, 8), (16, 16)])
@pytest.mark.parametrize(("kind", "suffix"), [("f16", "f16"), ("bf16", "bf16_1k")])
@pytest.mark.parametrize("accumulated", [True, False])
def test_layout_and_product(shape, kind, suffix, accumulated):
    size = shape[0]
    count = shape[0] ** 2 // 64
    a, b = (halves(generator.standard_normal(shape), kind) for _ in range(2))
    c = generator.standard_normal((size, size)).astype(np.float32)
    # AMD's layout of 32 x 32: register r of lane l holds row 8 (r / 4) + 4 (l / 32) + r mod 4.
    # AMD's layout of 16 x 16: register r of lane l holds row 4 (l / 16) + r.
    row = (
        (lambda r, lane: 8 * (r // 4) + 4 * (lane // 32) + r % 4)
        if size == 32
        else (lambda r, lane: 4 * (lane // 16) + r)
    )
    old = {8 + r: np.array([c[row(r, lane), lane % size] for lane in range(64)], np.float32) for r in range(count)}
    name = f"v_mfma_f32_{size}x{size}x{shape[1]}{suffix}"
    source = f"v[8:{7 + count}]" if accumulated else "0"
    text = f"{name} a[0:{count - 1}], v[0:1], v[2:3], {source}"
    state = after(text, {**registers(a, 0), **registers(b, 2), **old}, mask=np.zeros(64, bool))
    expected = widened(a, kind) @ widened(b, kind).T + (c if accumulated else 0)
    got = np.empty((size, size), np.float32)
    for r in range(count):
        for lane in range(64):
            got[row(r, lane), lane % size] = state.vector[32 + r, 0, lane : lane + 1].view(np.float32)[0]
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
        not after(
            "v_mfma_f32_32x32x8f16 v[8:23], v[0:1], v[2:3], v[8:23]",
            {**dict.fromkeys(range(4), np.zeros(64, np.uint32)), **old},
        )
        .vector[8:24]
        .any()
    )
