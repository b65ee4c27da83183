"""The tensors of a launch as a kernel sees them: ranges of addresses, outside of which no access may lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from .fault import Violation
from .state import Array


def window(data: Array, dtype: type[np.generic], count: int) -> Array:
    """`count` numbers that begin at each byte: [byte, count], memory shared; no access needs to be aligned."""
    size = np.dtype(dtype).itemsize
    return np.ndarray((max(0, data.size - size * count + 1), count), dtype, data.data, strides=(1, size))


class Memory:
    """Arrays by the addresses under which a kernel knows them: each array's own, or another that it is given."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._bytes: list[Array] = []
        self._starts: Array = np.empty(0, np.int64)
        self._ends: Array = np.empty(0, np.int64)

    def add(self, name: str, data: Array, address: int | None = None) -> int:
        """Let kernels use this array of bytes (uint8, contiguous), and return its address."""
        address = data.ctypes.data if address is None else address
        place = int(np.searchsorted(self._starts, address))
        self._names.insert(place, name)
        self._bytes.insert(place, data)
        self._starts = np.insert(self._starts, place, address)
        self._ends = np.insert(self._ends, place, address + data.size)
        return address

    def load(self, addresses: Array, where: Array, dtype: type[np.generic], count: int) -> Array:
        """`count` numbers per address, [*addresses, count]; zeros where not asked. Raises Violation outside of every
        range.
        """
        result = np.zeros([*addresses.shape, count], dtype)
        for of_range, window_, offsets in self._parts(addresses, where, dtype, count):
            result[of_range] = window_[offsets]
        return result

    def store(self, addresses: Array, where: Array, values: Array) -> None:
        """Write values [*addresses, count]. Raises Violation outside of every range."""
        for of_range, window_, offsets in self._parts(addresses, where, values.dtype.type, values.shape[-1]):
            window_[offsets] = values[of_range]

    def _parts(
        self, addresses: Array, where: Array, dtype: type[np.generic], count: int
    ) -> list[tuple[Any, Array, Array]]:
        """The accesses by range: (which, window, offsets in it)."""
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
