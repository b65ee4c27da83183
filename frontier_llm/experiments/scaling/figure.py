"""Figures of throughput and efficiency over devices, with measured, simulated, predicted and published points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from frontier_llm.experiments.scaling.harvest import Row, as_csv, as_json
from frontier_llm.files import write_atomically
from frontier_llm.pages import Chart, figures, level, line, points, table, text, write_page
from frontier_llm.planner.published import LEFT_OUT, PUBLISHED
from frontier_llm.units import format_seconds

DEVICES = "devices (GCDs on MI250X)"


def write_report(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Write scaling.csv, scaling.json and scaling.html to `directory`. Returns their paths."""
    paths = [directory / f"scaling.{kind}" for kind in ("csv", "json", "html")]
    write_atomically(paths[0], as_csv(rows))
    write_atomically(paths[1], as_json(rows))
    cells = [[show(row) for _, show in _COLUMNS] for row in rows]
    classes = [_style(row) for row in rows]
    modes = {row.mode for row in rows}
    published = [point for point in PUBLISHED if point.mode in modes]
    cited = [f"{point.label}, {point.mode} scaling: {point.efficiency:.2%}, {point.source}" for point in published]
    sources = "".join(f"<li>{text(source)}</li>" for source in cited)
    parts = [
        figures(charts(rows)),
        table([title for title, _ in _COLUMNS], cells, classes),
        "<p class=sub>Failed points stay in the table. The two predicted columns are the planner's tokens/s and "
        "efficiency. All columns, unrounded, "
        "are in <code>scaling.csv</code> and <code>scaling.json</code>.</p>",
        f"<h2>Published points</h2><ul>{sources}</ul><p>{text(LEFT_OUT.capitalize())}.</p>",
    ]
    subtitle = (
        "Solid lines are measured; dashed and dotted lines are simulated by the planner; grey stars and diamonds are "
        "published. Efficiency is tokens/s per device relative to the smallest measured point of the series; bars are "
        "95 % intervals over repeats."
    )
    write_page(paths[2], "Scaling experiments", subtitle, parts)
    return paths


def _style(row: Row) -> str:
    """Return the CSS class of the row in the table."""
    if row.kind == "simulated":
        return "simulated"
    return "" if row.status == "ok" else "bad"


def charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Yield a throughput chart and an efficiency chart for each mode that has rows."""
    for mode in ("weak", "strong"):
        own = [row for row in rows if row.mode == mode]
        if not own:
            continue
        throughput: list[dict[str, Any]] = []
        efficiency = [level("ideal", 100, [row.devices for row in own])]
        for index, name in enumerate(dict.fromkeys(map(_series_name, own))):
            _add_series(throughput, efficiency, name, [row for row in own if _series_name(row) == name], index)
        published = [point for point in PUBLISHED if point.mode == mode]
        for point, shape in zip(published, ("star", "diamond"), strict=False):
            share = points(f"{point.label} (published)", [point.devices], [100 * point.efficiency], shape=shape)
            efficiency.append({**share, "marker": {"color": "#888", "size": 11, "symbol": shape}})
        title = f"{mode.capitalize()} scaling: throughput"
        yield Chart(title, DEVICES, "tokens/s", throughput, log_x=True, log_y=True, height_px=380)
        values = [value for trace in efficiency for value in trace["y"]]
        lowest = min(values)  # near 0 if a point was not measured, because its cross is drawn near 0
        limits = {"yaxis": {"range": [0.9 * lowest, 1.05 * max(values)]}}
        title = f"{mode.capitalize()} scaling: efficiency"
        yield Chart(title, DEVICES, "efficiency per device, %", efficiency, log_x=True, height_px=380, layout=limits)


def _series_name(row: Row) -> str:
    return f"{row.model} on {row.site}, {row.kind}"


def _add_series(
    throughput: list[dict[str, Any]],
    efficiency: list[dict[str, Any]],
    name: str,
    rows: list[Row],
    index: int,
) -> None:
    """Add a series to both charts. Lines are solid if measured, dashed if simulated; failed points are crosses."""
    simulated = rows[0].kind == "simulated"
    marks = "square-open" if simulated else "circle"
    dash = "dash" if simulated else "solid"
    done = sorted((row for row in rows if row.tokens_per_s), key=lambda row: row.devices)
    if done:
        devices = [row.devices for row in done]
        rates = [row.tokens_per_s or 0.0 for row in done]
        shares = [100 * (row.efficiency or 0.0) for row in done]
        for traces, values in ((throughput, rates), (efficiency, shares)):
            half = [value * (row.ci95_percent or 0.0) / 100 for row, value in zip(done, values, strict=True)]
            trace = line(name, devices, values, index, marks=marks, dash=dash)
            traces.append({**trace, "error_y": {"type": "data", "array": half}})
        ideal = [rates[0] / devices[0] * count for count in devices]
        throughput.append({**line(f"{name}: ideal", devices, ideal, index), "opacity": 0.4})
    predicted = sorted((row for row in rows if row.predicted_efficiency and not simulated), key=lambda row: row.devices)
    if predicted:
        counts = [row.devices for row in predicted]
        label = f"{rows[0].model}, planner (simulated)"
        rates = [row.predicted_tokens_per_s or 0.0 for row in predicted]
        shares = [100 * (row.predicted_efficiency or 0.0) for row in predicted]
        for traces, values in ((throughput, rates), (efficiency, shares)):
            traces.append(line(label, counts, values, index, marks="square-open", dash="dot"))
    failed = [row for row in rows if not row.tokens_per_s]
    if failed:
        counts = [row.devices for row in failed]
        why = [row.status.split(":")[0] for row in failed]
        efficiency.append(points(f"{name}: not measured", counts, [2] * len(failed), index, shape="x", hover=why))


def _some(value: float | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)


# title and text of each cell
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("series", lambda row: f"{row.mode} {row.model}{', simulated' if row.kind == 'simulated' else ''}"),
    ("nodes", lambda row: str(row.nodes)),
    ("devices", lambda row: str(row.devices)),
    ("TP × PP × DP", lambda row: f"{row.tensor} × {row.pipeline} × {row.data}"),
    ("batch", lambda row: str(row.global_batch)),
    ("runs", lambda row: str(row.repeats)),
    ("step", lambda row: "–" if row.step_time_s is None else format_seconds(row.step_time_s)),
    ("tokens/s", lambda row: _some(row.tokens_per_s, "{:,.0f}")),
    ("± 95 %", lambda row: _some(row.ci95_percent, "{:.1f} %")),
    ("efficiency", lambda row: _some(row.efficiency, "{:.1%}")),
    ("predicted", lambda row: _some(row.predicted_tokens_per_s, "{:,.0f}")),
    ("predicted efficiency", lambda row: _some(row.predicted_efficiency, "{:.1%}")),
    ("status", lambda row: row.status),
)
