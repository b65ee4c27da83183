"""What rank 0 moved and waited for, as a section of report.html: a table, and the latency histogram of each axis."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from frontier_llm.page import table
from frontier_llm.units import format_bytes, format_seconds

BAR_HEIGHT, BAR_WIDTH = 48, 14  # pixels


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
        rows.append([axis, operation, f"{row['calls']:,}", format_bytes(row["bytes"]), format_seconds(row["blocked_s"]), *latencies])
    figures = "".join(f"<figure>{_bars(axis, bins)}</figure>" for axis, bins in by_axis(operations).items() if any(bins))
    note = "<p class=sub>How long calls of rank 0 blocked, in powers of two of microseconds.</p>"
    return f"<h2>Communication {html.escape(title)}</h2>{table(head, rows)}{note}<div class=figures>{figures}</div>"


def _bars(axis: str, bins: list[int]) -> str:
    first = next(index for index, count in enumerate(bins) if count)
    last = max(index for index, count in enumerate(bins) if count)
    bars = []
    for place, index in enumerate(range(first, last + 1)):
        height = BAR_HEIGHT * bins[index] / max(bins)
        what = f"{bins[index]:,} calls below {format_seconds((1 << index) * 1e-6)}"
        x, y = place * BAR_WIDTH, BAR_HEIGHT + 14 - height
        bars.append(f'<rect x="{x}" y="{y:.1f}" width="{BAR_WIDTH - 2}" height="{height:.1f}" fill="#4c78a8"><title>{what}</title></rect>')
    span = f"{format_seconds((1 << first) * 1e-6)} to {format_seconds((1 << last) * 1e-6)}"
    width = max(len(bars) * BAR_WIDTH, 220)
    text = f'<text x="0" y="10" font-size="10" font-family="sans-serif">{html.escape(axis)}: {span}</text>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {BAR_HEIGHT + 16}">{text}{"".join(bars)}</svg>'
