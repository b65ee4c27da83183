"""Timeline of a measured step: compute and communication of each rank, as a Chrome trace and as a figure.

A rank has three rows: its compute actions, the time in which it was blocked by communication, and each communication
from its start to its end (in flight). Communication in flight while the rank is not blocked is hidden behind compute.
Sends are not drawn in flight, because their end is only checked at the end of the schedule. On a GPU all times are
those of the host.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frontier_llm.comm.ledger import Call, Ledger
from frontier_llm.files import write_atomically
from frontier_llm.units import strict_json

ROWS = ("compute", "blocked", "in flight")
COLORS = {
    "forward": "#4c72b0",
    "backward": "#55a868",
    "other compute": "#b8b8b8",
    "blocked": "#c44e52",
    "in flight": "#8da0cb",
}


@dataclass(frozen=True)
class Interval:
    """Interval in seconds of the host's monotonic clock, which all ranks of a host share."""

    row: str
    name: str
    begin: float
    end: float


@dataclass
class MeasuredTimeline:
    """Recorder of one rank's intervals.

    The communication ledger reports blocked intervals, and the engine's `on_action` reports compute actions.
    """

    rank: int
    intervals: list[Interval] = field(default_factory=list)
    _action: tuple[str, float] | None = None

    def attach(self, ledger: Ledger) -> None:
        """Record every blocked interval from now on."""
        ledger.observer = self._observe

    def _observe(self, call: Call, begin: float, end: float) -> None:
        name = f"{call.axis} {call.operation}"
        self.intervals.append(Interval("blocked", name, begin, end))
        if call.finished and call.operation != "send":
            self.intervals.append(Interval("in flight", name, call.begun, end))

    def at(self, name: str) -> None:
        """Begin the action `name` and end the previous action. An empty name only ends the previous action."""
        now = time.perf_counter()
        if self._action is not None:
            self.intervals.append(Interval("compute", self._action[0], self._action[1], now))
        self._action = (name, now) if name else None

    def exposed_and_hidden_s(self) -> dict[str, tuple[float, float]]:
        """Return exposed and hidden seconds by axis and operation.

        In exposed time this rank was blocked. In hidden time it was not blocked, and a call was in flight.
        """
        names: dict[str, dict[str, list[tuple[float, float]]]] = {row: defaultdict(list) for row in ROWS}
        for interval in self.intervals:
            names[interval.row][interval.name].append((interval.begin, interval.end))
        blocked = names["blocked"]
        flight = names["in flight"]
        exposed_s = {name: _covered_s(blocked[name]) for name in sorted({*blocked, *flight})}
        result = {}
        for name, seconds in exposed_s.items():
            hidden_s = max(_covered_s(flight[name]) - seconds, 0.0)
            result[name] = (seconds, hidden_s)
        return result

    def chrome_events(self) -> list[dict[str, Any]]:
        """Return complete events ('X') for chrome://tracing and Perfetto: a process per rank and a thread per row."""
        names = [
            {
                "ph": "M",
                "name": "thread_name",
                "pid": self.rank,
                "tid": tid,
                "args": {"name": row},
            }
            for tid, row in enumerate(ROWS)
        ]
        return names + [
            {
                "ph": "X",
                "name": i.name,
                "pid": self.rank,
                "tid": ROWS.index(i.row),
                "ts": i.begin * 1e6,
                "dur": (i.end - i.begin) * 1e6,
            }
            for i in self.intervals
        ]


def _covered_s(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of (begin, end)."""
    total = 0.0
    reached = float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def write_chrome_trace(path: Path, timelines: list[MeasuredTimeline]) -> None:
    """Write one trace file with all given ranks."""
    events = [event for timeline in timelines for event in timeline.chrome_events()]
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"origin": "measured"},
    }
    write_atomically(path, strict_json(content, indent=None))


def draw(path: Path, timelines: list[MeasuredTimeline]) -> None:
    """Draw a figure (PNG, SVG or PDF). Each rank has rows for compute, blocked time, and calls in flight per axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    start = min(interval.begin for timeline in timelines for interval in timeline.intervals)
    rows = [(f"rank {timeline.rank} {label}", chosen) for timeline in timelines for label, chosen in _rows(timeline)]
    figure, axes = pyplot.subplots(figsize=(12, 0.9 + 0.3 * len(rows)), layout="constrained")
    for place, (_, intervals) in enumerate(rows):
        bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for interval in intervals:
            begin_ms = (interval.begin - start) * 1e3
            length_ms = (interval.end - interval.begin) * 1e3
            bars[_kind(interval)].append((begin_ms, length_ms))
        for kind, of_kind in bars.items():  # one call per kind: drawing thousands of bars one by one takes minutes
            axes.broken_barh(of_kind, (place - 0.4, 0.8), color=COLORS[kind], edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    handles = [patches.Patch(color=color, label=kind) for kind, color in COLORS.items()]
    axes.legend(
        handles=handles, ncols=len(handles), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8
    )
    figure.savefig(path)
    pyplot.close(figure)


def _rows(timeline: MeasuredTimeline) -> list[tuple[str, list[Interval]]]:
    """Return (name, intervals) of the figure's rows: 'computes', 'blocked', 'dp in flight', …"""
    of = {row: [interval for interval in timeline.intervals if interval.row == row] for row in ROWS}
    by_axis: dict[str, list[Interval]] = defaultdict(list)
    for interval in of["in flight"]:
        by_axis[interval.name.split(" ")[0]].append(interval)
    return [
        ("computes", of["compute"]),
        ("blocked", of["blocked"]),
        *((f"{axis} in flight", by_axis[axis]) for axis in sorted(by_axis)),
    ]


def _kind(interval: Interval) -> str:
    if interval.row != "compute":
        return interval.row
    for kind in ("forward", "backward"):
        if interval.name.startswith(kind):
            return kind
    return "other compute"
