"""Statistics of a rank's communication: calls, bytes and blocked time per (axis, operation), and the last calls.

Blocked time is the time that the rank spends waiting for communication.
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

from frontier_llm.comm.group_memory import GroupMemory
from frontier_llm.files import write_replaced
from frontier_llm.units import strict_json

Span = tuple[torch.cuda.Event, torch.cuda.Event]
RECORDED_CALLS = 512  # number of most recent calls that are kept, about 100 bytes each


def mark() -> torch.cuda.Event:
    """Record a timing event on the device's current stream, and return it."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(slots=True)
class Call:
    """One collective or message."""

    axis: str
    operation: str
    number: int  # number of this call among the calls of its axis and operation
    bytes: int
    started_s: float  # Start time in seconds since the epoch (time.time()).
    blocked_s: float = 0.0  # Time that this rank has waited for the call.
    # True if wait() has returned on this rank. On a GPU, wait() returns when the stream's wait is queued.
    finished: bool = False
    # start time of the call on the clock time.perf_counter, from which intervals are computed
    begun: float = field(default_factory=time.perf_counter)


@dataclass
class Histogram:
    """Distribution of blocked times. Bin k counts calls of 2^(k-1) to 2^k µs, and bin 0 calls of less than 1 µs."""

    bins: list[int] = field(default_factory=lambda: [0] * 40)

    def add(self, seconds: float) -> None:
        """Count one call that blocked for `seconds`."""
        self.bins[min(int(seconds * 1e6).bit_length(), 39)] += 1

    def quantile_us(self, share: float) -> int:
        """Return the quantile `share` of the blocked times in µs, as the upper edge of its bin. 0 without calls."""
        wanted = share * sum(self.bins)
        seen = 0
        for index, count in enumerate(self.bins):
            seen += count
            if count and seen >= wanted:
                return 1 << index
        return 0


@dataclass
class Ledger:
    """Communication statistics of one rank: calls, bytes and blocked time.

    Bytes are the size of the caller's tensor, not the traffic of the algorithm: the tensor for all_reduce and
    broadcast, the gathered result for all_gather, the full input for reduce_scatter, and the message for send and recv.
    Axes of size 1 are not counted, because they transfer nothing. An engine of another library (FSDP, DeepSpeed)
    starts collectives that this object does not see.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    blocked_s: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    latency: dict[tuple[str, str], Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    recent: deque[Call] = field(default_factory=lambda: deque(maxlen=RECORDED_CALLS), repr=False)
    # called with each blocked interval (call, start, end), for timelines
    observer: Callable[[Call, float, float], None] | None = field(default=None, repr=False)
    # on a GPU, while a step is measured: the intervals in which the stream waited for communication; otherwise None
    waits: list[Span] | None = field(default=None, repr=False)
    in_flight: int = 0  # number of communications that have begun and whose wait() has not ended
    most_in_flight: int = 0
    # number of pipeline actions that have begun; a rank without collectives makes progress by them
    actions: int = 0
    not_counted: str = ""  # engine whose own collectives are missing in these statistics; "" = nothing is missing
    memory: GroupMemory | None = field(default=None, repr=False)  # device memory of the groups; None without groups
    _depth: int = field(default=0, repr=False)

    def add(self, axis: str, operation: str, size_bytes: int) -> Call:
        """Record the start of a call. Pass the returned object to `blocked` when waiting for the call."""
        self.calls[axis, operation] += 1
        self.bytes[axis, operation] += size_bytes
        call = Call(axis, operation, self.calls[axis, operation], size_bytes, time.time())
        self.recent.append(call)
        return call

    def count_in_flight(self, more: int) -> None:
        """Change the number of communications in flight by `more`, which may be negative."""
        self.in_flight += more
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    @contextmanager
    def blocked(self, call: Call, last: bool = True) -> Iterator[None]:
        """Record the time of the body as blocked time of `call`. With `last`, the call ends with the body.

        On a GPU only the stream waits for communication, and the recorded time is the time of the host. A call inside
        another call (a stage of a hierarchical collective) has its own latency, but its time is added to the sums only
        once.
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
        """Return the last call as text, for example 'dp reduce_scatter number 17, unfinished', or 'none'."""
        if not self.recent:
            return "none"
        call = self.recent[-1]
        return f"{call.axis} {call.operation} number {call.number}{'' if call.finished else ', unfinished'}"

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return the statistics for each axis and operation, with keys such as 'dp reduce_scatter'.

        The statistics are calls, bytes, total blocked seconds, quantiles of a call's blocked time, and the histogram.
        """
        return {
            f"{axis} {operation}": {
                "calls": calls,
                "bytes": self.bytes[axis, operation],
                "blocked_s": round(self.blocked_s[axis, operation], 6),
                "p50_us": self.latency[axis, operation].quantile_us(0.5),
                "p99_us": self.latency[axis, operation].quantile_us(0.99),
                "bins": list(self.latency[axis, operation].bins),
            }
            for (axis, operation), calls in sorted(self.calls.items())
        }

    def latency_by_axis(self) -> dict[str, dict[str, int]]:
        """Return, for each axis, the number of calls of all operations and the quantiles of a call's blocked time."""
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
        """Write the last calls of this rank, including unfinished calls, to a JSON file.

        After a hang, a comparison of these files shows in which calls the ranks differ.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "reason": reason,
            "pid": os.getpid(),
            "time_s": time.time(),
            "calls": [asdict(call) for call in self.recent],
        }
        write_replaced(path, strict_json(content).encode())
