"""Emulates the LDS (shared memory) of each workgroup, and detects races between waves that no barrier separates."""

from __future__ import annotations

from typing import Final

import numpy as np

from .fault import Violation
from .global_memory import window
from .state import LANES, Array, Waves

_BANKS: Final = 32  # number of banks of 4 bytes; a bank delivers one word per cycle, to all lanes that read it
_LANES: Final[Array] = np.arange(LANES)
# Groups of lanes that are served at once. For reads of 16 bytes, lanes 0 to 3 are grouped with 20 to 23, 4 to 7 with 16
# to 19, and so on. All other accesses group neighbouring lanes.
_WIDE_READS: Final[Array] = np.argsort(_LANES // 32 * 4 + (_LANES // 4 % 4 ^ _LANES // 16 % 2), kind="stable")
_CELL: Final = 2  # bytes of a cell, the unit of the race check
_WAVES: Final = 64  # stamps are epoch * 64 + wave within the workgroup
_MANY: Final = _WAVES - 1


def bank_cycles(addresses: Array, active: Array, size: int, *, reads: bool) -> int:
    """Return the LDS cycles for an access in which each lane of one wave reads or writes `size` bytes.

    The hardware serves a group of lanes at once: 32 lanes up to 4 bytes each, 16 lanes of 8 bytes, 8 lanes of 16. A
    group takes one cycle per word of its busiest bank.

    Banks and groups: AMD, Composable Kernel, "Understanding AMD GPU LDS and bank conflicts"; AMD OpenCL programming
    guide, "LDS optimizations".
    """
    words = max(1, size // 4)
    order = _WIDE_READS if reads and words == 4 else _LANES
    cycles = 0
    for group in order.reshape(-1, _BANKS // words):
        lanes = group[active[group]]
        wanted = np.unique(addresses[lanes, None] // 4 + np.arange(words))
        cycles += max(1, int(np.bincount(wanted % _BANKS, minlength=1).max()))
    return cycles


class LocalMemory:
    """The LDS of all workgroups. `epoch` counts the barriers of each workgroup. Two waves race if they access a cell in
    the same epoch and one of them writes it.

    While `watched` is set, `cycles` sums the LDS cycles of the first chosen wave's accesses.
    """

    def __init__(self, groups: int, waves_per_group: int, shared_bytes: int) -> None:
        self._bytes = shared_bytes
        self._waves_per_group = waves_per_group
        self._data: Array = np.full(groups * shared_bytes, 0xA5, np.uint8)
        self._cells = -(-shared_bytes // _CELL)
        self._written: Array = np.full(groups * self._cells, -1, np.int64)
        self._read: Array = np.full(groups * self._cells, -1, np.int64)
        self.epoch: Array = np.zeros(groups, np.int64)
        self.watched = False
        self.cycles = 0

    def load(self, waves: Waves, addresses: Array, dtype: type[np.generic], count: int) -> Array:
        """Return the numbers at each active lane's address, [wave, lane, count]. Raises Violation for an address
        outside of the LDS, a race, or memory that no wave has written.
        """
        self._watch(waves, addresses, np.dtype(dtype).itemsize * count, reads=True)
        offsets, cells, stamps = self._place(waves, addresses, np.dtype(dtype).itemsize * count)
        self._refuse(waves, self._written[cells] < 0, "reads LDS that no wave wrote")
        self._refuse_others(waves, self._written[cells], stamps, "reads what another wave wrote")
        before = self._read[cells]
        self._read[cells] = stamps
        shared = (self._read[cells] != stamps) | _by_another(before, stamps)
        if shared.any():
            self._read[cells[shared]] = stamps[shared] | _MANY
        result = np.zeros([*addresses.shape, count], dtype)
        result[waves.lanes] = window(self._data, dtype, count)[offsets]
        return result

    def store(self, waves: Waves, addresses: Array, values: Array) -> None:
        """Write values [wave, lane, count] of the active lanes. Raises Violation. A write that does not change the
        stored value is no race.
        """
        self._watch(waves, addresses, values.itemsize * values.shape[-1], reads=False)
        offsets, cells, stamps = self._place(waves, addresses, values.itemsize * values.shape[-1])
        data = window(self._data, values.dtype.type, values.shape[-1])
        new = values[waves.lanes]
        changed = (data[offsets] != new).any(axis=1)
        self._refuse_others(waves, self._written[cells], stamps, "writes what another wave wrote", changed)
        self._refuse_others(waves, self._read[cells], stamps, "writes what another wave read", changed)
        self._written[cells] = stamps
        data[offsets] = new
        self._refuse_others(
            waves, self._written[cells], stamps, "writes what another wave writes", (data[offsets] != new).any(axis=1)
        )

    def _watch(self, waves: Waves, addresses: Array, size: int, *, reads: bool) -> None:
        if self.watched:
            self.cycles += bank_cycles(addresses[0], waves.lanes[0], size, reads=reads)

    def _place(self, waves: Waves, addresses: Array, size: int) -> tuple[Array, Array, Array]:
        """Return for the active lanes the offsets into the data, the cells [access, cell], and the stamps (epoch and
        wave) that the access gives to these cells.
        """
        stray = waves.lanes & (addresses + size > self._bytes)
        if stray.any():
            wave, lane = (int(index) for index in np.argwhere(stray)[0])
            what = f"{size} bytes at {int(addresses[wave, lane])} of {self._bytes} bytes of LDS"
            raise Violation(f"an LDS access outside of what the launch gives: {what}", wave, lane)
        group = waves.group[waves.waves]
        stamps = np.broadcast_to(
            (self.epoch[group] * _WAVES + waves.waves % self._waves_per_group)[:, None], addresses.shape
        )
        base = np.broadcast_to(group[:, None], addresses.shape)[waves.lanes]
        inside = addresses[waves.lanes]
        cells = (base * self._cells + inside // _CELL)[:, None] + np.arange(-(-size // _CELL))
        return base * self._bytes + inside, cells, np.broadcast_to(stamps[waves.lanes][:, None], cells.shape)

    def _refuse_others(
        self, waves: Waves, found: Array, stamps: Array, what: str, accesses: Array | None = None
    ) -> None:
        others = _by_another(found, stamps)
        if accesses is not None:
            others &= accesses[:, None]
        self._refuse(waves, others, f"a race in LDS, no barrier between: {what}")

    def _refuse(self, waves: Waves, wrong: Array, what: str) -> None:
        """Raise Violation for the first true entry of `wrong` [access, cell]."""
        if wrong.any():
            wave, lane = (int(index) for index in np.argwhere(waves.lanes)[np.argwhere(wrong)[0][0]])
            raise Violation(what, wave, lane)


def _by_another(found: Array, stamps: Array) -> Array:
    """Return which of the stamps `found` are from the same epoch but from another wave."""
    return (found != stamps) & (found ^ stamps >= 0) & ((found ^ stamps) < _WAVES)
