"""Emulates the vector instructions that use lane masks (one bit per lane) or scalar registers.

They are comparisons, sums with carry, v_div_scale and v_div_fmas, and reading the value of one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from .arithmetic import div_fmas, div_scale
from .operands import Operand, Read, Unknown, reader, split
from .scalar import Step
from .state import VCC, Array, Waves, as_lanes
from .vector_table import COMPARE


def readers(operands: Sequence[Operand], kinds: Sequence[str]) -> list[Read]:
    """Return for each operand a function that reads it as a number of its kind, per lane."""
    return [reader(source, kind, per_lane=True) for source, kind in zip(operands, kinds, strict=True)]


def write(waves: Waves, destination: Operand, words: Sequence[Array], also: Array | None = None) -> None:
    """Write a result of one or more 32-bit words per lane into consecutive vector registers."""
    for place, word in enumerate(words):
        waves.write_vector(destination.register + place, word, also)


def lanes_of(mask: Operand) -> Read:
    """Return a function that reads a mask (in scalar registers, or constant) as booleans per lane."""
    if mask.register < 0:
        bits = np.full(1, mask.number & 0xFFFFFFFFFFFFFFFF if isinstance(mask.number, int) else 0, np.uint64)
        return lambda waves: as_lanes(bits)
    return lambda waves: as_lanes(waves.mask(mask.register))


def compare(name: str, operands: list[Operand]) -> Step:
    """Compile v_cmp_*. The result is a mask with one bit per lane; the bits of inactive lanes are 0."""
    kind, function = COMPARE[name]
    destination, *sources = operands
    reads = readers(sources, [kind, kind])
    return lambda waves: waves.write_mask(
        destination.register, waves.lanes & function(*(read(waves) for read in reads))
    )


def _with_carry(sign: int, carried: bool) -> Callable[[list[Operand]], Step]:
    """Compile a 32-bit sum or difference that writes the carry of each lane into a mask."""

    def make(operands: list[Operand]) -> Step:
        destination, carry, *sources = operands
        reads = readers(sources[:2], ["u32", "u32"])
        taken = lanes_of(sources[2]) if carried else None

        def run(waves: Waves) -> None:
            a, b = (read(waves).astype(np.int64) for read in reads)
            total = a + sign * (b + (taken(waves) if taken else 0))
            write(waves, destination, split(total, "u32"))
            waves.write_mask(carry.register, waves.lanes & ((total < 0) | (total > 0xFFFFFFFF)))

        return run

    return make


def _multiply_add(kind: str) -> Callable[[list[Operand]], Step]:
    """Compile v_mad_u64_u32 or v_mad_i64_i32. The sum has 65 bits, and its highest bit is written into a mask."""
    wide = {"u32": "u64", "i32": "i64"}[kind]

    def make(operands: list[Operand]) -> Step:
        destination, carry, *sources = operands
        a, b, c = readers(sources, [kind, kind, wide])
        dtype = np.dtype({"u64": np.uint64, "i64": np.int64}[wide])

        def run(waves: Waves) -> None:
            product = a(waves).astype(dtype) * b(waves).astype(dtype)
            addend = c(waves)
            total = product + addend
            signed = np.where((product < 0) == (addend < 0), product < 0, total < 0)
            highest = total < addend if wide == "u64" else signed
            write(waves, destination, split(total, wide))
            waves.write_mask(carry.register, waves.lanes & highest)

        return run

    return make


def _scale(operands: list[Operand]) -> Step:
    destination, flag, *sources = operands
    reads = readers(sources, ["f32"] * 3)

    def run(waves: Waves) -> None:
        value, back = div_scale(*(read(waves) for read in reads))
        write(waves, destination, split(value, "f32"))
        waves.write_mask(flag.register, waves.lanes & back)

    return run


def _refine(operands: list[Operand]) -> Step:
    destination, *sources = operands
    reads = readers(sources, ["f32"] * 3)

    def run(waves: Waves) -> None:
        a, b, c = (read(waves) for read in reads)
        value = div_fmas(a, b, c, as_lanes(waves.mask(VCC)))
        write(waves, destination, split(value, "f32"))

    return run


def _read_lane(operands: list[Operand]) -> Step:
    """Compile v_readlane_b32, or v_readfirstlane_b32, which has no lane number and reads the first active lane."""
    destination, source, *lane = operands
    if lane and lane[0].register >= 0:
        raise Unknown(f"lane {lane[0].text}")
    number = int(lane[0].number) if lane else None

    def run(waves: Waves) -> None:
        values = waves.vector[source.register, waves.chosen]
        lanes = np.argmax(waves.lanes, axis=1) if number is None else np.full(len(values), number)
        waves.write_scalar(destination.register, values[np.arange(len(values)), lanes])

    return run


OTHERS: Final[dict[str, Callable[[list[Operand]], Step]]] = {
    "v_add_co_u32": _with_carry(1, False),
    "v_addc_co_u32": _with_carry(1, True),
    "v_sub_co_u32": _with_carry(-1, False),
    "v_subrev_co_u32": lambda operands: _with_carry(-1, False)([*operands[:2], operands[3], operands[2]]),
    "v_subb_co_u32": _with_carry(-1, True),
    "v_mad_u64_u32": _multiply_add("u32"),
    "v_mad_i64_i32": _multiply_add("i32"),
    "v_div_scale_f32": _scale,
    "v_div_fmas_f32": _refine,
    "v_readlane_b32": _read_lane,
    "v_readfirstlane_b32": _read_lane,
}
