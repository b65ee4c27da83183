"""What rank 0 moved and waited for, as a section of report.html: a table, and the latency histogram of each axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frontier_llm.pages import COLORS, Chart, figures, table, text
from frontier_llm.units import format_bytes, format_seconds


def by_axis(operations: Mapping[str, Mapping[str, Any]]) -> dict[str, list[int]]:
    """One histogram per axis: bin k counts calls that blocked 2^(k-1) to 2^k microseconds (comm.ledger.Histogram)."""
    axes: dict[str, list[list[int]]] = {}
    for name, row in operations.items():
        axes.setdefault(name.split(" ")[0], []).append(row["bins"])
    return {axis: [sum(column) for column in zip(*rows, strict=True)] for axis, rows in axes.items()}


def communication_section(title: str, operations: Mapping[str, Mapping[str, Any]]) -> str:
    """HTML for one run; blocked time is what the rank stood still, on a GPU what its host did."""
    head = ("axis", "operation", "calls", "bytes", "blocked", "median", "99 %")
    rows = []
    for name, row in operations.items():
        axis, _, operation = name.partition(" ")
        latencies = [f"< {format_seconds(row[key] * 1e-6)}" for key in ("p50_us", "p99_us")]
        rows.append(
            [
                axis,
                operation,
                f"{row['calls']:,}",
                format_bytes(row["bytes"]),
                format_seconds(row["blocked_s"]),
                *latencies,
            ]
        )
    charts = [_calls(axis, bins) for axis, bins in by_axis(operations).items() if any(bins)]
    return f"<h2>Communication {text(title)}</h2>{table(head, rows)}{figures(charts)}"


def _calls(axis: str, bins: list[int]) -> Chart:
    """A histogram in powers of two of microseconds."""
    first = next(index for index, count in enumerate(bins) if count)
    last = max(index for index, count in enumerate(bins) if count)
    shown = range(first, last + 1)
    names = [format_seconds((1 << index) * 1e-6) for index in shown]
    hover = [f"{bins[index]:,} calls below {name}" for index, name in zip(shown, names, strict=True)]
    trace = {
        "type": "bar",
        "x": names,
        "y": [bins[index] for index in shown],
        "hovertext": hover,
        "hoverinfo": "text",
        "marker": {"color": COLORS[0]},
    }
    return Chart(f"How long calls of rank 0 blocked: {axis}", "blocked for less than", "calls", [trace], height_px=240)
