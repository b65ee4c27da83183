"""Global memory of the simulator: the address ranges of a launch's tensors. An access outside of them is a fault."""

from __future__ import annotations

from typing import Any

import numpy as np

from .fault import Violation
from .state import Array


def window(data: Array, dtype: type[np.generic], count: int) -> Array:
    """Return a view [byte, count] of the memory: for each byte, the `count` numbers that begin there. It serves
    unaligned accesses too.
    """
    size = np.dtype(dtype).itemsize
    return np.ndarray((max(0, data.size - size * count + 1), count), dtype, data.data, strides=(1, size))


class Memory:
    """The arrays that a kernel can access, by address. An array has its own address, or one that the caller gives."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._bytes: list[Array] = []
        self._starts: Array = np.empty(0, np.int64)
        self._ends: Array = np.empty(0, np.int64)

    def add(self, name: str, data: Array, address: int | None = None) -> int:
        """Let kernels access this array of bytes (uint8, contiguous), and return its address for the kernel."""
        address = data.ctypes.data if address is None else address
        place = int(np.searchsorted(self._starts, address))
        self._names.insert(place, name)
        self._bytes.insert(place, data)
        self._starts = np.insert(self._starts, place, address)
        self._ends = np.insert(self._ends, place, address + data.size)
        return address

    def load(self, addresses: Array, where: Array, dtype: type[np.generic], count: int) -> Array:
        """Return `count` numbers per address, [*addresses, count], and zeros if `where` is false. Raises Violation
        for an address outside of every range.
        """
        result = np.zeros([*addresses.shape, count], dtype)
        for of_range, window_, offsets in self._parts(addresses, where, dtype, count):
            result[of_range] = window_[offsets]
        return result

    def store(self, addresses: Array, where: Array, values: Array) -> None:
        """Write values [*addresses, count]. Raises Violation for an address outside of every range."""
        for of_range, window_, offsets in self._parts(addresses, where, values.dtype.type, values.shape[-1]):
            window_[offsets] = values[of_range]

    def _parts(
        self, addresses: Array, where: Array, dtype: type[np.generic], count: int
    ) -> list[tuple[Any, Array, Array]]:
        """Group the accesses by range. Return (which accesses, window of the range, offsets in the window)."""
        if not where.any():
            return []
        size = np.dtype(dtype).itemsize * count
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        stray = where & ((index < 0) | (addresses + size > self._ends[np.maximum(index, 0)]))
        if stray.any():
            raise self._stray(addresses, stray, size)
        parts = []
        for place in np.unique(index[where]):
            chosen = where & (index == place)
            parts.append((chosen, window(self._bytes[place], dtype, count), addresses[chosen] - self._starts[place]))
        return parts

    def _stray(self, addresses: Array, stray: Array, size: int) -> Violation:
        wave, lane = (int(index) for index in np.argwhere(stray)[0])
        address = int(addresses[wave, lane])
        nearest = int(np.argmin(np.minimum(abs(self._starts - address), abs(self._ends - address))))
        start = int(self._starts[nearest])
        end = int(self._ends[nearest])
        what = f"{size} bytes at offset {address - start} of {self._names[nearest]}, which has {end - start} bytes"
        return Violation(f"a global access outside of the launch's tensors: {what}", wave, lane)
