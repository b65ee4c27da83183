"""What a step's communication hides behind compute and what it exposes: measured intervals as a Chrome trace and as a figure.

Rows of a rank: compute by action, blocked (exposed), and each call from its start to its end (in flight); in flight less blocked is
hidden. On a GPU these are the host's times.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frontier_llm.comm.ledger import Call, Ledger

ROWS = ("compute", "blocked", "in flight")
COLORS = {"compute": "#4c72b0", "blocked": "#c44e52", "in flight": "#8da0cb"}


@dataclass(frozen=True)
class Interval:
    """Seconds on the host's monotonic clock, which all ranks of a host share."""

    row: str
    name: str
    begin: float
    end: float


@dataclass
class Timeline:
    """One rank's recorder; attached to its ledger, and told of actions by the engine's `on_action`."""

    rank: int
    intervals: list[Interval] = field(default_factory=list)
    _action: tuple[str, float] | None = None

    def attach(self, ledger: Ledger) -> None:
        """Listen to every blocked interval from now on."""
        ledger.observer = self._observe

    def _observe(self, call: Call, begin: float, end: float) -> None:
        name = f"{call.axis} {call.operation}"
        self.intervals.append(Interval("blocked", name, begin, end))
        if call.finished:
            self.intervals.append(Interval("in flight", name, call.begun, end))

    def at(self, name: str) -> None:
        """The rank turns to an action; the one before ends here."""
        now = time.perf_counter()
        if self._action is not None:
            self.intervals.append(Interval("compute", self._action[0], self._action[1], now))
        self._action = (name, now) if name else None

    def exposed_and_hidden_s(self) -> dict[str, tuple[float, float]]:
        """By axis and operation: (seconds this rank stood still, seconds that calls were in flight meanwhile it did not)."""
        blocked: dict[str, float] = defaultdict(float)
        flight: dict[str, float] = defaultdict(float)
        for interval in self.intervals:
            if interval.row != "compute":
                (blocked if interval.row == "blocked" else flight)[interval.name] += interval.end - interval.begin
        return {name: (blocked[name], max(flight[name] - blocked[name], 0.0)) for name in sorted(flight)}

    def chrome_events(self) -> list[dict[str, Any]]:
        """Complete events ('X') for chrome://tracing and Perfetto; a process per rank, a thread per row."""
        names = [{"ph": "M", "name": "thread_name", "pid": self.rank, "tid": tid, "args": {"name": row}} for tid, row in enumerate(ROWS)]
        return names + [
            {"ph": "X", "name": i.name, "pid": self.rank, "tid": ROWS.index(i.row), "ts": i.begin * 1e6, "dur": (i.end - i.begin) * 1e6}
            for i in self.intervals
        ]


def write_chrome_trace(path: Path, timelines: list[Timeline]) -> None:
    """One file with all given ranks."""
    events = [event for timeline in timelines for event in timeline.chrome_events()]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin": "measured"}}), encoding="utf-8")


def draw(path: Path, timelines: list[Timeline]) -> None:
    """A figure (PNG, SVG or PDF): three rows per rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    start = min(interval.begin for timeline in timelines for interval in timeline.intervals)
    figure, axes = pyplot.subplots(figsize=(11, 0.5 + 1.1 * len(timelines)), layout="constrained")
    labels = [f"rank {timeline.rank} {row}" for timeline in timelines for row in ROWS]
    for index, timeline in enumerate(timelines):
        for offset, row in enumerate(ROWS):
            bars = [((i.begin - start) * 1e3, (i.end - i.begin) * 1e3) for i in timeline.intervals if i.row == row]
            axes.broken_barh(bars, (index * len(ROWS) + offset - 0.4, 0.8), color=COLORS[row])
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.savefig(path)
    pyplot.close(figure)
