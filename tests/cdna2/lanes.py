"""Emulates the modifiers of a vector instruction's operands: values of other lanes (DPP), parts of registers (SDWA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from .operands import Operand, Read, Unknown
from .state import LANES, Array, Waves

_LANE: Final = np.arange(LANES)
_ROW: Final = _LANE // 16
PARTS: Final = {
    "DWORD": (0, 32),
    **{f"WORD_{i}": (16 * i, 16) for i in range(2)},
    **{f"BYTE_{i}": (8 * i, 8) for i in range(4)},
}


def _in_row(place: Array) -> Array:
    """Turn places in each lane's row of 16 lanes into lane numbers. A place outside of the row gives -1."""
    return np.where((place >= 0) & (place < 16), 16 * _ROW + place, -1)


def _source_lanes(name: str, value: str) -> Array | None:
    """Return the lane that each lane reads, or -1 for no lane. Returns None if the modifier is no DPP control."""
    place = _LANE % 16
    by = int(value) if value.isdigit() else 0
    if name == "quad_perm":
        return 4 * (_LANE // 4) + np.array([int(lane) for lane in value.strip("[]").split(",")])[_LANE % 4]
    if name == "row_bcast":  # the source is the last lane of the previous row, or of the first half of the wave
        return {15: np.where(_ROW > 0, 16 * _ROW - 1, -1), 31: np.where(_ROW > 1, 31, -1)}[by]
    known: dict[str, Callable[[], Array]] = {
        "row_shl": lambda: _in_row(place + by),
        "row_shr": lambda: _in_row(place - by),
        "row_ror": lambda: 16 * _ROW + (place - by) % 16,
        "row_newbcast": lambda: 16 * _ROW + by,
        "row_mirror": lambda: 16 * _ROW + 15 - place,
        "row_half_mirror": lambda: _LANE - place % 8 + 7 - place % 8,
    }
    return known[name]() if name in known else None


class FromOtherLanes:
    """DPP: lane i reads lane `lanes[i]`. Lanes that row_mask or bank_mask exclude are not written. Lanes without a
    source read 0 if bound_ctrl is set, and are not written otherwise.
    """

    def __init__(self, modifiers: dict[str, str]) -> None:
        rest = dict(modifiers)
        masks = [int(rest.pop(name), 0) for name in ("row_mask", "bank_mask")]
        self.zero = bool(int(rest.pop("bound_ctrl", "-1")) >= 0)  # LLVM 13 and older print the set bit as 0
        found = [lanes for name, value in rest.items() if (lanes := _source_lanes(name, value)) is not None]
        if len(found) != 1 or len(rest) != 1:
            raise Unknown(f"modifiers {rest}")
        self.lanes = found[0]
        self.enabled = (masks[0] >> _ROW & 1 == 1) & (masks[1] >> _LANE % 16 // 4 & 1 == 1)

    def valid(self, waves: Waves) -> Array:
        """Return the lanes whose source lane exists and is active."""
        return (self.lanes >= 0) & waves.lanes[:, self.lanes]

    def written(self, waves: Waves) -> Array:
        """Return which of the active lanes the instruction writes."""
        return np.broadcast_to(self.enabled, waves.lanes.shape) if self.zero else self.enabled & self.valid(waves)

    def through(self, read: Read) -> Read:
        """Return a reader that gives each lane the value which `read` returns for its source lane."""

        def shuffled(waves: Waves) -> Array:
            values = read(waves)[:, self.lanes]
            return np.where(self.valid(waves), values, values.dtype.type(0))

        return shuffled


def part(source: Operand, selection: str, kind: str, read: Read) -> Read:
    """SDWA: return a reader of a byte or half of a register, zero-extended. `read` returns the register's 32 bits."""
    if selection not in PARTS or source.negate or source.absolute:
        raise Unknown(f"selection {selection} of {source.text}")
    first, width = PARTS[selection]
    if width == 32 and kind != "f16":
        return lambda waves: read(waves).view(kind_dtype(kind))
    mask = np.uint32((1 << min(width, 16 if kind == "f16" else 32)) - 1)

    def extracted(waves: Waves) -> Array:
        bits = read(waves) >> np.uint32(first) & mask
        return bits.astype(np.uint16).view(np.float16) if kind == "f16" else bits.view(kind_dtype(kind))

    return extracted


def kind_dtype(kind: str) -> np.dtype[np.generic]:
    """Return numpy's type for a 32-bit kind."""
    return np.dtype({"u32": np.uint32, "i32": np.int32, "f32": np.float32}[kind])
