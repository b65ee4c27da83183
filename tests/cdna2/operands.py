"""Parses the operands of an instruction and makes functions that read them.

Operands are registers, inline constants and literals, with negation and absolute value.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np

from .disassembly import Descriptor
from .state import EXEC, M0, VCC, Array, Waves

Read = Callable[[Waves], Array]

# Number type of each kind of operand. A 64-bit operand uses two registers.
KINDS: Final[dict[str, Any]] = {
    "u16": np.uint16, "f16": np.float16, "u32": np.uint32, "i32": np.int32, "f32": np.float32,
    "u64": np.uint64, "i64": np.int64, "f64": np.float64,
}  # fmt: skip
_NAMED: Final = {"vcc": (VCC, 2), "exec": (EXEC, 2), "m0": (M0, 1), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1)}
_REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])$")
_MODIFIED = re.compile(r"(?P<minus>-?)(?:neg\((?P<negated>.*)\)|\|(?P<absolute>.*)\||(?P<plain>.*))$")
_NUMBER = re.compile(r"-?(0x[0-9a-f]+|[\d.]+)$")
_INVERSE_TWO_PI = 0.15915494


@dataclass(frozen=True)
class Operand:
    """One operand: a register (vector or scalar) or a number, optionally negated or as its absolute value."""

    text: str
    vector: bool = False
    register: int = -1  # index into Waves.vector or Waves.scalar; -1 if the operand is a number
    count: int = 0
    number: float | int = 0
    negate: bool = False
    absolute: bool = False

    @cached_property
    def rows(self) -> frozenset[tuple[bool, int]]:
        """The registers of the operand, as (is a vector register, index)."""
        return (
            frozenset((self.vector, self.register + place) for place in range(self.count))
            if self.register >= 0
            else frozenset()
        )


class Unknown(Exception):
    """A part of an instruction that the simulator does not know."""


@lru_cache(maxsize=1 << 16)  # a kernel uses the same few hundred operands many times
def operand(text: str, descriptor: Descriptor) -> Operand:
    """Parse the text of an operand. Raises Unknown if it has an unknown form."""
    if _NUMBER.match(text):  # -1 and -0.5 are numbers, not negated operands
        return Operand(text, number=float(text) if "." in text else int(text, 0))
    parts = _MODIFIED.match(text)
    assert parts
    body = parts["negated"] or parts["absolute"] or parts["plain"]
    modified = {"negate": bool(parts["minus"] or parts["negated"]), "absolute": bool(parts["absolute"])}
    if body in _NAMED:
        register, count = _NAMED[body]
        return Operand(text, False, register, count, **modified)
    if found := _REGISTER.match(body):
        first = int(found[2] or found[3])
        count = 1 if found[2] else int(found[4]) - first + 1
        offset = 0
        end = descriptor.vector_registers
        if found[1] == "a":
            offset = descriptor.accumulation_offset
        elif found[1] == "v":
            end = min(end, descriptor.accumulation_offset)
        if found[1] == "s":
            end = VCC
        if first + offset + count > end:
            raise Unknown(f"register {body}: the kernel descriptor allocates less")
        return Operand(text, found[1] != "s", first + offset, count, **modified)
    if _NUMBER.match(body):
        return Operand(text, number=float(body) if "." in body else int(body, 0), **modified)
    raise Unknown(f"operand {text}")


def constant_bits(number: float | int, kind: str) -> int:
    """Return the bits of an inline constant or literal. A float is encoded in the operand's own type, and an integer is
    sign-extended.
    """
    width = np.dtype(KINDS[kind]).itemsize
    if isinstance(number, float):
        number = 1 / (2 * np.pi) if number == _INVERSE_TWO_PI else number
        (bits,) = struct.unpack(*{2: ("<H", struct.pack("<e", number)), 4: ("<I", struct.pack("<f", number))}.get(
            width, ("<Q", struct.pack("<d", number))))  # fmt: skip
        return int(bits)
    if width == 8 and not -16 <= number <= 64:
        raise Unknown(f"literal {number:#x} for 64 bits")
    return number & ((1 << 8 * width) - 1)


@lru_cache(maxsize=1 << 16)
def reader(source: Operand, kind: str, per_lane: bool) -> Read:
    """Return a function that reads the operand's values. With `per_lane` (vector instructions) the shape is
    [wave, lane], with one lane for scalars; otherwise it is [wave].
    """
    dtype = np.dtype(KINDS[kind])
    read = _constant(source, kind, per_lane) if source.register < 0 else _words(source, dtype.itemsize, per_lane)
    if (source.negate or source.absolute) and dtype.kind != "f":
        raise Unknown(f"{source.text} where bits are meant")
    if not (source.negate or source.absolute):
        return lambda waves: read(waves).view(dtype)
    if not source.negate:
        return lambda waves: np.abs(read(waves).view(dtype))
    if not source.absolute:
        return lambda waves: np.negative(read(waves).view(dtype))
    return lambda waves: np.negative(np.abs(read(waves).view(dtype)))


def _constant(source: Operand, kind: str, per_lane: bool) -> Read:
    width = np.dtype(KINDS[kind]).itemsize
    value = np.full((1, 1) if per_lane else (1,), constant_bits(source.number, kind), f"<u{width}")
    return lambda waves: value


def _words(source: Operand, width: int, per_lane: bool) -> Read:
    """Return a function that reads registers as unsigned integers of `width` bytes."""
    register = source.register
    vector = source.vector
    if source.count != max(1, width // 4):
        raise Unknown(f"{source.text} where {8 * width} bits are meant")
    if vector and not per_lane:
        raise Unknown(f"{source.text} in a scalar instruction")

    def word(waves: Waves, place: int) -> Array:
        if vector:
            return waves.vector[register + place, waves.chosen]
        bits = waves.scalar[register + place, waves.chosen]
        return bits[:, None] if per_lane else bits

    def half(waves: Waves) -> Array:
        return word(waves, 0).astype(np.uint16)

    def one(waves: Waves) -> Array:
        return word(waves, 0)

    def two(waves: Waves) -> Array:
        low = word(waves, 0)
        high = word(waves, 1)
        return np.stack([low, high], axis=-1).view(np.uint64)[..., 0]

    return {2: half, 4: one, 8: two}[width]


def writable(destination: Operand, kind: str) -> None:
    """Raise Unknown unless a result of this kind fits into the operand."""
    if destination.register < 0 or destination.count != max(1, np.dtype(KINDS[kind]).itemsize // 4):
        raise Unknown(f"{destination.text} for a result of kind {kind}")


def split(values: Array, kind: str) -> list[Array]:
    """Split values of a kind into the 32-bit words of registers, low word first. 16-bit values are zero-extended."""
    typed = np.asarray(values).astype(KINDS[kind], copy=False)
    width = typed.dtype.itemsize
    if width == 2:
        return [typed.view(np.uint16).astype(np.uint32)]
    if width == 4:
        return [typed.view(np.uint32)]
    whole = typed.view(np.uint64)
    return [whole.astype(np.uint32), (whole >> np.uint64(32)).astype(np.uint32)]
