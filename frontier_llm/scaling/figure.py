"""Throughput and efficiency over devices: measured, simulated, predicted and published points on the same axes."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frontier_llm.scaling.harvest import Row, as_csv, as_json
from frontier_llm.units import format_count, format_seconds


@dataclass(frozen=True)
class Published:
    """An efficiency that others have measured."""

    mode: str
    label: str
    devices: int
    efficiency: float
    source: str


# arXiv 2312.12705 (ORNL, Frontier): weak 100 % and strong 89 % and 87 % in the abstract; the further digits stand in the body
PUBLISHED = (
    Published("weak", "ORNL 175B", 1024, 1.00, "arXiv 2312.12705, abstract"),
    Published("weak", "ORNL 1T", 3072, 1.00, "arXiv 2312.12705, abstract"),
    Published("strong", "ORNL 175B, batch 8000", 1024, 0.8993, "arXiv 2312.12705 (abstract: 89 %)"),
    Published("strong", "ORNL 1T, batch 8016", 3072, 0.8705, "arXiv 2312.12705 (abstract: 87 %)"),
)
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b")


def draw(rows: Sequence[Row], path: Path, dpi: int = 140) -> None:
    """Write a PNG: a row of two panels per mode present."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    modes = [mode for mode in ("weak", "strong") if any(row.mode == mode for row in rows)]
    figure = Figure(figsize=(11, 4.2 * len(modes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(modes), 2, squeeze=False)
    for (throughput, efficiency), mode in zip(axes, modes, strict=True):
        own = [row for row in rows if row.mode == mode]
        for number, name in enumerate(dict.fromkeys(_series_name(row) for row in own)):
            color = _COLORS[number % len(_COLORS)]
            _plot_series(throughput, efficiency, name, [row for row in own if _series_name(row) == name], color)
        _plot_published(efficiency, mode)
        _finish(throughput, efficiency, mode, sorted({row.devices for row in own}))
    figure.savefig(path, dpi=dpi)


def _series_name(row: Row) -> str:
    return f"{row.model} on {row.site}, {row.kind}"


def _plot_series(throughput: Any, efficiency: Any, name: str, rows: list[Row], color: str) -> None:
    """Solid: measured. Dashed: the planner. A cross at the bottom: a point that gave no measurement."""
    simulated = rows[0].kind == "simulated"
    style = {
        "color": color,
        "linestyle": "--" if simulated else "-",
        "marker": "s" if simulated else "o",
        "markerfacecolor": "none" if simulated else color,
    }
    done = sorted((row for row in rows if row.tokens_per_s), key=lambda row: row.devices)
    if done:
        devices = [row.devices for row in done]
        rates, shares = [row.tokens_per_s or 0.0 for row in done], [100 * (row.efficiency or 0.0) for row in done]
        for axes, values in ((throughput, rates), (efficiency, shares)):
            half = [value * (row.ci95_percent or 0.0) / 100 for row, value in zip(done, values, strict=True)]
            axes.errorbar(devices, values, yerr=half, capsize=3, label=name, **style)
        ideal = [rates[0] / devices[0] * count for count in devices]
        throughput.plot(devices, ideal, color=color, linewidth=0.8, alpha=0.5, label="ideal")
    predicted = sorted((row for row in rows if row.predicted_efficiency and not simulated), key=lambda row: row.devices)
    if predicted:
        counts = [row.devices for row in predicted]
        dotted = {
            "color": color,
            "linestyle": ":",
            "marker": "s",
            "markerfacecolor": "none",
            "label": f"{rows[0].model}, planner (simulated)",
        }
        throughput.plot(counts, [row.predicted_tokens_per_s for row in predicted], **dotted)
        efficiency.plot(counts, [100 * (row.predicted_efficiency or 0.0) for row in predicted], **dotted)
    for row in rows:
        if not row.tokens_per_s:
            efficiency.plot([row.devices], [2], color=color, marker="x", markersize=9)
            efficiency.annotate(row.status.split(":")[0], (row.devices, 4), ha="center", fontsize=7, color=color)


def _plot_published(efficiency: Any, mode: str) -> None:
    for point, marker in zip((point for point in PUBLISHED if point.mode == mode), "*D", strict=False):
        efficiency.plot(
            [point.devices],
            [100 * point.efficiency],
            marker=marker,
            color="black",
            markersize=9,
            linestyle="none",
            label=f"{point.label} (published)",
        )


def _finish(throughput: Any, efficiency: Any, mode: str, devices: list[int]) -> None:
    """Axes, ticks at the device counts that occur, legends."""
    for axis, extra in ((throughput, set()), (efficiency, {point.devices for point in PUBLISHED if point.mode == mode})):
        axis.set_xscale("log", base=2)
        axis.set(xlabel="devices (GCDs on MI250X)", xticks=sorted({*devices, *extra}))
        axis.minorticks_off()
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.grid(alpha=0.3)
    throughput.set_yscale("log", base=2)
    throughput.set(ylabel="tokens/s", title=f"{mode} scaling: throughput")
    throughput.yaxis.set_major_formatter(lambda value, _: format_count(value))
    efficiency.set(ylabel="efficiency per device, %", ylim=(0, 112), title=f"{mode} scaling: efficiency")
    efficiency.axhline(100, color="gray", linewidth=0.8)
    for axis in (throughput, efficiency):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)


def page(rows: Sequence[Row], png: bytes) -> str:
    """A self-contained HTML page: the figure, the table, the sources."""
    image = base64.b64encode(png).decode()
    header = "".join(f"<th>{html.escape(title)}</th>" for title, _ in _COLUMNS)
    body = "\n".join(
        f'<tr class="{"simulated" if row.kind == "simulated" else "" if row.status == "ok" else "bad"}">'
        + "".join(f"<td>{html.escape(text(row))}</td>" for _, text in _COLUMNS)
        + "</tr>"
        for row in rows
    )
    sources = "".join(f"<li>{html.escape(f'{point.label}: {point.efficiency:.2%}, {point.source}')}</li>" for point in PUBLISHED)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Scaling</title><style>
:root {{ color-scheme: light dark }} body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1280px; padding: 0 1rem }}
img {{ max-width: 100% }} .wide {{ overflow-x: auto }} table {{ border-collapse: collapse; font-size: 13px; width: 100% }}
th, td {{ border-bottom: 1px solid #8886; padding: .3rem .45rem; text-align: right; white-space: nowrap }} tr.bad td {{ background: #d9303030 }}
th:first-child, td:first-child, th:last-child, td:last-child {{ text-align: left }} td:last-child {{ white-space: normal; min-width: 12rem }}
tr.simulated td {{ font-style: italic; opacity: .75 }}
</style></head><body><h1>Scaling experiments</h1>
<p>Solid lines are measured; dashed and dotted lines are simulated by the planner; black marks are published. Efficiency is tokens/s per device
relative to the smallest measured point of the series; bars are 95 % intervals over repeats. Failed points stay in the table.
The two predicted columns are the planner's tokens/s and efficiency. All columns, unrounded, are in <code>scaling.csv</code> and <code>scaling.json</code>.</p>
<img alt="throughput and efficiency over devices" src="data:image/png;base64,{image}">
<div class="wide"><table><tr>{header}</tr>
{body}</table></div><h2>Published points</h2><ul>{sources}</ul></body></html>
"""


def _some(value: float | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)


# title, text of the cell
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("series", lambda row: f"{row.mode} {row.model}" + (", simulated" if row.kind == "simulated" else "")),
    ("nodes", lambda row: str(row.nodes)),
    ("devices", lambda row: str(row.devices)),
    ("TP × PP × DP", lambda row: f"{row.tensor} × {row.pipeline} × {row.data}"),
    ("batch", lambda row: str(row.global_batch)),
    ("runs", lambda row: str(row.repeats)),
    ("step", lambda row: "–" if row.step_time_s is None else format_seconds(row.step_time_s)),
    ("tokens/s", lambda row: _some(row.tokens_per_s, "{:,.0f}")),
    ("± 95 %", lambda row: _some(row.ci95_percent, "{:.1f} %")),
    ("efficiency", lambda row: "–" if row.efficiency is None else f"{row.efficiency:.1%}"),
    ("predicted", lambda row: _some(row.predicted_tokens_per_s, "{:,.0f}")),
    ("predicted efficiency", lambda row: "–" if row.predicted_efficiency is None else f"{row.predicted_efficiency:.1%}"),
    ("status", lambda row: row.status),
)


def write_report(rows: Sequence[Row], directory: Path) -> list[Path]:
    """scaling.csv, scaling.json, scaling.png and scaling.html in `directory`; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"scaling.{kind}" for kind in ("csv", "json", "png", "html")]
    paths[0].write_text(as_csv(rows), encoding="utf-8")
    paths[1].write_text(as_json(rows), encoding="utf-8")
    draw(rows, paths[2])
    paths[3].write_text(page(rows, paths[2].read_bytes()), encoding="utf-8")
    return paths
