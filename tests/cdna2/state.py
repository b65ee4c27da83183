"""The registers of many waves, and the choice of the waves that execute the next instruction together."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

LANES: Final = 64
VCC: Final = 106
M0: Final = 124
EXEC: Final = 126
_SCALARS: Final = 128
_POISON: Final = 0x7FF5DEAD  # initial value of a register, a NaN


class Waves:
    """Scalar registers [register, wave] and vector registers [register, wave, lane] of many waves.

    The next instruction is executed for the waves in `chosen`. In `vector`, accumulation registers begin at the
    descriptor's `accumulation_offset`.
    """

    def __init__(self, vector_registers: int, groups: int, waves_per_group: int, shared_bytes: int) -> None:
        self.count = groups * waves_per_group
        self.waves_per_group = waves_per_group
        self.shared_bytes = shared_bytes
        self.group = np.repeat(np.arange(groups), waves_per_group)
        self.scalar: Array = np.full((_SCALARS, self.count), _POISON, np.uint32)
        self.vector: Array = np.full((vector_registers, self.count, LANES), _POISON, np.uint32)
        self.scc: Array = np.zeros(self.count, bool)
        self.scalar[EXEC : EXEC + 2] = 0xFFFFFFFF
        self.choose(np.arange(self.count))

    def choose(self, waves: Array) -> None:
        """Select the waves for which the next instructions are executed."""
        self.waves = waves
        self.chosen: Any = slice(None) if len(waves) == self.count else waves
        self.refresh_lanes()

    def refresh_lanes(self) -> None:
        """Update `lanes` after the execution mask was written."""
        self.lanes = as_lanes(self.mask(EXEC))
        self.all_lanes = bool(self.lanes.all())

    def mask(self, register: int) -> Array:
        """Return two consecutive scalar registers as one 64-bit number per wave."""
        low = self.scalar[register, self.chosen]
        high = self.scalar[register + 1, self.chosen]
        return np.ascontiguousarray(low | high.astype(np.uint64) << np.uint64(32))

    def write_scalar(self, register: int, bits: Array) -> None:
        """Write a scalar register, 32 bits per wave."""
        self.scalar[register, self.chosen] = bits
        if register >= EXEC:
            self.refresh_lanes()

    def write_mask(self, register: int, lanes: Array) -> None:
        """Write a boolean per lane, as a mask of 64 bits, into two scalar registers."""
        words = np.packbits(lanes, axis=1, bitorder="little").view(np.uint32)
        self.scalar[register, self.chosen] = words[:, 0]
        self.scalar[register + 1, self.chosen] = words[:, 1]
        if register >= EXEC:
            self.refresh_lanes()

    def write_vector(self, register: int, bits: Array, also: Array | None = None) -> None:
        """Write a vector register, 32 bits per lane, in the lanes that the execution mask and `also` select."""
        row = self.vector[register]
        chosen = self.chosen
        if self.all_lanes and also is None:
            row[chosen] = bits
            return
        where = self.lanes if also is None else self.lanes & also
        if isinstance(chosen, slice):
            np.copyto(row, bits, where=where)
        else:
            row[chosen] = np.where(where, bits, row[chosen])


def as_lanes(masks: Array) -> Array:
    """Return 64-bit masks [wave] as booleans [wave, lane]."""
    return np.unpackbits(masks.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little").view(bool)
