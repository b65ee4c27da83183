"""The LDS of each workgroup, and who touched which part of it since the last barrier."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.cdna2.fault import Violation
from tests.cdna2.global_memory import window
from tests.cdna2.state import Array, Waves

_CELL: Final = 2  # bytes: the smallest access
_WAVES: Final = 64  # stamps are epoch * 64 + wave within the workgroup
_MANY: Final = _WAVES - 1


class LocalMemory:
    """`epoch` counts each workgroup's barriers. Two waves that touch one cell in the same epoch, one of them writing, race."""

    def __init__(self, groups: int, waves_per_group: int, shared_bytes: int) -> None:
        self._bytes, self._waves_per_group = shared_bytes, waves_per_group
        self._data: Array = np.full(groups * shared_bytes, 0xA5, np.uint8)
        self._cells = -(-shared_bytes // _CELL)
        self._written: Array = np.full(groups * self._cells, -1, np.int64)
        self._read: Array = np.full(groups * self._cells, -1, np.int64)
        self.epoch: Array = np.zeros(groups, np.int64)

    def load(self, waves: Waves, addresses: Array, dtype: type[np.generic], count: int) -> Array:
        """Numbers at each active lane's address, [wave, lane, count]; raises Violation."""
        offsets, cells, stamps = self._place(waves, addresses, np.dtype(dtype).itemsize * count)
        self._refuse(waves, self._written[cells] < 0, "reads LDS that no wave wrote")
        self._refuse_others(waves, self._written[cells], stamps, "reads what another wave wrote")
        before = self._read[cells]
        self._read[cells] = stamps
        shared = (self._read[cells] != stamps) | _by_another(before, stamps)
        if shared.any():
            self._read[cells[shared]] = stamps[shared] | _MANY
        result = np.zeros((*addresses.shape, count), dtype)
        result[waves.lanes] = window(self._data, dtype, count)[offsets]
        return result

    def store(self, waves: Waves, addresses: Array, values: Array) -> None:
        """Write values [wave, lane, count] of the active lanes; raises Violation. Writing what is there already is no race."""
        offsets, cells, stamps = self._place(waves, addresses, values.itemsize * values.shape[-1])
        data, new = window(self._data, values.dtype.type, values.shape[-1]), values[waves.lanes]
        changed = (data[offsets] != new).any(axis=1)
        self._refuse_others(waves, self._written[cells], stamps, "writes what another wave wrote", changed)
        self._refuse_others(waves, self._read[cells], stamps, "writes what another wave read", changed)
        self._written[cells] = stamps
        data[offsets] = new
        self._refuse_others(waves, self._written[cells], stamps, "writes what another wave writes", (data[offsets] != new).any(axis=1))

    def _place(self, waves: Waves, addresses: Array, size: int) -> tuple[Array, Array, Array]:
        """Of the active lanes: offsets into the data, and the cells [access, cell] with the stamps that they would get."""
        stray = waves.lanes & (addresses + size > self._bytes)
        if stray.any():
            wave, lane = (int(index) for index in np.argwhere(stray)[0])
            what = f"{size} bytes at {int(addresses[wave, lane])} of {self._bytes} bytes of LDS"
            raise Violation(f"an LDS access outside of what the launch gives: {what}", wave, lane)
        group = waves.group[waves.waves]
        stamps = np.broadcast_to((self.epoch[group] * _WAVES + waves.waves % self._waves_per_group)[:, None], addresses.shape)
        base = np.broadcast_to(group[:, None], addresses.shape)[waves.lanes]
        inside = addresses[waves.lanes]
        cells = (base * self._cells + inside // _CELL)[:, None] + np.arange(-(-size // _CELL))
        return base * self._bytes + inside, cells, np.broadcast_to(stamps[waves.lanes][:, None], cells.shape)

    def _refuse_others(self, waves: Waves, found: Array, stamps: Array, what: str, accesses: Array | None = None) -> None:
        others = _by_another(found, stamps)
        if accesses is not None:
            others &= accesses[:, None]
        self._refuse(waves, others, f"a race in LDS, no barrier between: {what}")

    def _refuse(self, waves: Waves, wrong: Array, what: str) -> None:
        """Raises Violation for the first wrong [access, cell]."""
        if wrong.any():
            wave, lane = (int(index) for index in np.argwhere(waves.lanes)[np.argwhere(wrong)[0][0]])
            raise Violation(what, wave, lane)


def _by_another(found: Array, stamps: Array) -> Array:
    """Stamps of the same epoch and another wave."""
    return (found != stamps) & (found ^ stamps >= 0) & ((found ^ stamps) < _WAVES)
