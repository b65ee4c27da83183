"""What was moved: calls and bytes per (axis, operation), counted where the call is made."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Counts of one rank. Bytes are the payload that the caller sees, not what the algorithm sends:

    all_reduce, broadcast: the tensor; all_gather: the gathered result; reduce_scatter: the full input; send, recv: the message.
    Axes of size 1 move nothing and are not counted.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, axis: str, operation: str, size_bytes: int) -> None:
        """Record one call."""
        self.calls[axis, operation] += 1
        self.bytes[axis, operation] += size_bytes

    def reset(self) -> None:
        """Start counting anew, e.g. at a step's begin."""
        self.calls.clear()
        self.bytes.clear()

    def as_rows(self) -> list[tuple[str, str, int, int]]:
        """(axis, operation, calls, bytes), sorted."""
        return [(axis, operation, self.calls[axis, operation], size) for (axis, operation), size in sorted(self.bytes.items())]
