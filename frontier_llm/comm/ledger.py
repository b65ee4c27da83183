"""What was moved and how long it was waited for: calls, bytes and blocked seconds per (axis, operation)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Counts of one rank. Bytes are the payload that the caller sees, not what the algorithm sends:

    all_reduce, broadcast: the tensor; all_gather: the gathered result; reduce_scatter: the full input; send, recv: the message.
    Axes of size 1 move nothing and are not counted.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    blocked_s: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def add(self, axis: str, operation: str, size_bytes: int) -> None:
        """Record one call."""
        self.calls[axis, operation] += 1
        self.bytes[axis, operation] += size_bytes

    @contextmanager
    def blocked(self, axis: str, operation: str) -> Iterator[None]:
        """Record how long this rank stands still in the body. On a GPU only the stream waits: this is then the host's time."""
        begin = time.perf_counter()
        yield
        self.blocked_s[axis, operation] += time.perf_counter() - begin

    def reset(self) -> None:
        """Start counting anew, e.g. at a step's begin."""
        self.calls.clear()
        self.bytes.clear()
        self.blocked_s.clear()

    def as_rows(self) -> list[tuple[str, str, int, int]]:
        """(axis, operation, calls, bytes), sorted."""
        return [(axis, operation, self.calls[axis, operation], size) for (axis, operation), size in sorted(self.bytes.items())]
