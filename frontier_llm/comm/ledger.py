"""What was moved and how long it was waited for: calls, bytes and blocked time per (axis, operation), and a flight
record of the last calls.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from frontier_llm.files import write_replaced
from frontier_llm.units import strict_json

Span = tuple[torch.cuda.Event, torch.cuda.Event]
RECORDED_CALLS = 512  # a few steps of a layer's calls; 100 bytes each


def mark() -> torch.cuda.Event:
    """A moment of the device's current stream, with its time."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(slots=True)
class Call:
    """One collective or message."""

    axis: str
    operation: str
    number: int  # counts the calls of this axis and operation since the mesh was made
    bytes: int
    started_s: float  # time.time()
    blocked_s: float = 0.0  # how long this rank has stood still for it
    finished: bool = False  # on this rank; on a GPU: enqueued
    # the same moment on the clock that intervals are measured with
    begun: float = field(default_factory=time.perf_counter)


@dataclass
class Histogram:
    """How long calls blocked: bin k counts 2^(k-1) … 2^k microseconds, bin 0 less than one."""

    bins: list[int] = field(default_factory=lambda: [0] * 40)

    def add(self, seconds: float) -> None:
        """Count one call."""
        self.bins[min(int(seconds * 1e6).bit_length(), 39)] += 1

    def quantile_us(self, share: float) -> int:
        """The upper edge of the bin in which that share of all calls is reached; 0 without calls."""
        wanted = share * sum(self.bins)
        seen = 0
        for index, count in enumerate(self.bins):
            seen += count
            if count and seen >= wanted:
                return 1 << index
        return 0


@dataclass
class Ledger:
    """Counts of one rank. Bytes are the payload that the caller sees, not what the algorithm sends:

    all_reduce, broadcast: the tensor; all_gather: the gathered result; reduce_scatter: the full input; send, recv: the
    message. Axes of size 1 move nothing and are not counted.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    blocked_s: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    latency: dict[tuple[str, str], Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    recent: deque[Call] = field(default_factory=lambda: deque(maxlen=RECORDED_CALLS), repr=False)
    # told of each blocked interval (timelines)
    observer: Callable[[Call, float, float], None] | None = field(default=None, repr=False)
    # on a GPU, while a step is measured: what the stream stood still for
    waits: list[Span] | None = field(default=None, repr=False)
    in_flight: int = 0  # communications that have begun and were not waited for to their end
    most_in_flight: int = 0
    _depth: int = field(default=0, repr=False)

    def add(self, axis: str, operation: str, size_bytes: int) -> Call:
        """Record one call; hand it to `blocked` when it is waited for."""
        self.calls[axis, operation] += 1
        self.bytes[axis, operation] += size_bytes
        call = Call(axis, operation, self.calls[axis, operation], size_bytes, time.time())
        self.recent.append(call)
        return call

    def count_in_flight(self, more: int) -> None:
        """So many more are in flight than before."""
        self.in_flight += more
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    @contextmanager
    def blocked(self, call: Call, last: bool = True) -> Iterator[None]:
        """Record how long this rank stands still in the body; `last` ends the call. On a GPU only the stream waits:
        this is then the host's time.

        A call made within another (a stage of a hierarchical collective) has its own latency, but the time counts once.
        """
        measured = self.waits is not None and last and not self._depth
        start = mark() if measured else None
        begin = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            call.blocked_s += (elapsed_s := time.perf_counter() - begin)
            if not self._depth:
                self.blocked_s[call.axis, call.operation] += elapsed_s
        call.finished = last
        if start is not None and self.waits is not None:
            self.waits.append((start, mark()))
        if self.observer is not None and not self._depth:
            self.observer(call, begin, begin + elapsed_s)
        if last:
            self.latency[call.axis, call.operation].add(call.blocked_s)

    def last(self) -> str:
        """'dp reduce_scatter number 17, unfinished', or 'none'."""
        if not self.recent:
            return "none"
        call = self.recent[-1]
        return f"{call.axis} {call.operation} number {call.number}{'' if call.finished else ', unfinished'}"

    def summary(self) -> dict[str, dict[str, Any]]:
        """By 'axis operation': calls, bytes, blocked seconds, quantiles of how long a call blocked, and the
        histogram itself.
        """
        return {
            f"{axis} {operation}": {
                "calls": calls,
                "bytes": self.bytes[axis, operation],
                "blocked_s": round(self.blocked_s[axis, operation], 6),
                "p50_us": self.latency[axis, operation].quantile_us(0.5),
                "p99_us": self.latency[axis, operation].quantile_us(0.99),
                "bins": list(self.latency[axis, operation].bins),  # see Histogram
            }
            for (axis, operation), calls in sorted(self.calls.items())
        }

    def latency_by_axis(self) -> dict[str, dict[str, int]]:
        """By axis, over all its operations: calls, and quantiles of how long a call blocked."""
        axes: dict[str, Histogram] = defaultdict(Histogram)
        for (axis, _), histogram in self.latency.items():
            axes[axis].bins = [sum(pair) for pair in zip(axes[axis].bins, histogram.bins, strict=True)]
        return {
            axis: {
                "calls": sum(axes[axis].bins),
                "p50_us": axes[axis].quantile_us(0.5),
                "p99_us": axes[axis].quantile_us(0.99),
            }
            for axis in sorted(axes)
        }

    def dump(self, path: Path, reason: str) -> None:
        """Write the last calls of this rank, unfinished ones included, as JSON: what to compare between ranks after
        a hang.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "reason": reason,
            "pid": os.getpid(),
            "time_s": time.time(),
            "calls": [asdict(call) for call in self.recent],
        }
        write_replaced(path, strict_json(content).encode())
