"""Writes HTML pages with tables and interactive figures, in one style with a light and a dark theme.

A page is one self-contained file. Plotly draws its figures, and the page contains Plotly's script (4.8 MB). Without the
`plotly` package a page has only texts and tables and states that figures are missing. A figure is written as JSON
without Plotly's Python classes, because importing them is slow.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from frontier_llm import log
from frontier_llm.errors import not_installed
from frontier_llm.files import write_atomically
from frontier_llm.units import strict_json

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")
# Colours of the parts of a stacked bar. Neighbours differ by at least 30 in CIELAB lightness, and any two colours by 6,
# so that the parts are also distinct in grey.
PARTS = (
    "#00427f",
    "#e1843d",
    "#005d2d",
    "#ff84ad",
    "#af2d31",
    "#09cfe0",
    "#8e53b5",
    "#bed761",
    "#008c7b",
    "#ffda67",
    "#0391e8",
    "#fee7fa",
)
DASHES = ("solid", "dash", "dot", "dashdot")
LONGEST_LINE = 40  # characters of a table's cell that are not broken into lines.
# Plotly sets colours on each element, so these rules override them to follow the light or dark theme
CSS = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6b7b; --line: #d9e0e7; --card: #fff; --page: #f5f7f9 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --soft: #9aa8b5; --line: #33404c; --card: #1b232b; --page: #12181e } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto; max-width: 1120px; padding: 2rem 1rem }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; overflow-wrap: anywhere }
p.sub { color: var(--soft); margin: .2rem 0 1rem }
.tiles { margin-bottom: .8rem; display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem }
.tile, figure, .wide, pre, details { background: var(--card); border: 1px solid var(--line); border-radius: 8px }
.tile { padding: .7rem 1rem } .tile b { display: block; font-size: 1.35rem } .tile span { color: var(--soft); font-size: .85rem }
figure { margin: 0 0 .8rem; padding: .3rem; min-width: 0 } .figures figure { margin: 0 }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: .8rem }
.figures { margin-bottom: .8rem }
figcaption { font-weight: 600; font-size: .9rem; padding: .3rem .5rem 0; overflow-wrap: anywhere }
.wide { overflow-x: auto; margin-bottom: .5rem }
/* A shadow at an edge shows that the table continues there. The first two layers move with the table and hide it. */
.wide { background: linear-gradient(90deg, var(--card) 30%, transparent) left / 2rem 100% no-repeat local,
  linear-gradient(270deg, var(--card) 30%, transparent) right / 2rem 100% no-repeat local,
  linear-gradient(90deg, #8888, transparent) left / .7rem 100% no-repeat scroll,
  linear-gradient(270deg, #8888, transparent) right / .7rem 100% no-repeat scroll, var(--card) }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
td, th { padding: .35rem .6rem; text-align: left; border-top: 1px solid var(--line); white-space: nowrap }
th, td:first-child { white-space: normal }
td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 6rem }
@media (max-width: 600px) { td, th { padding: .3rem } td:last-child { min-width: 5rem } }
td.long, td.long:last-child { white-space: normal; min-width: 14rem }
 tr:first-child td, tr:first-child th { border-top: 0 }
tr.bad td { background: #d9303030 } tr.simulated td { font-style: italic; opacity: .75 }
pre { padding: .8rem 1rem; overflow-x: auto; font-size: 12.5px }
pre.lines { white-space: pre-wrap; overflow-wrap: anywhere }
details { padding: .5rem 1rem } details pre { border: 0; padding: 0 }
.mesh { display: flex; gap: .5rem; overflow-x: auto }
.stage { flex: 1; border: 1px solid var(--line); border-radius: 8px; padding: .5rem; background: var(--card) }
.rank { display: inline-block; border-radius: 5px; padding: .1rem .5rem; margin: .12rem; color: #fff; font-size: .85rem; white-space: nowrap }
.chart text { fill: var(--ink) !important } .chart .bars text { fill: #fff !important }
.chart .gridlayer path, .chart .zerolinelayer path { stroke: var(--line) !important }
.chart .legend .bg, .chart .modebar-group { fill: transparent !important; background: transparent !important }
.chart .modebar-btn path { fill: var(--soft) !important }
.chart .hoverlayer text { fill: #fff !important }
"""  # noqa: E501
DRAW = """
for (const source of document.querySelectorAll("script.figure")) {
  const { data, layout } = JSON.parse(source.textContent);
  const buttons = [["zoom2d", "pan2d", "resetScale2d", "toImage"]];
  Plotly.newPlot(source.previousElementSibling, data, layout, { responsive: true, displaylogo: false, modeBarButtons: buttons });
}
"""  # noqa: E501


@dataclass(frozen=True)
class Chart:
    """A figure: traces in Plotly's JSON format, and axis titles with their units."""

    title: str
    x: str
    y: str
    traces: Sequence[Mapping[str, Any]]
    log_x: bool = False
    log_y: bool = False
    height_px: int = 320
    # additional Plotly layout options, which override the defaults
    layout: Mapping[str, Any] = field(default_factory=dict)


def line(
    name: str,
    x: Iterable[Any],
    y: Iterable[Any],
    index: int = 0,
    *,
    marks: str = "",
    dash: str = "",
    hover: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a trace of one curve in the colour of series `index`.

    `marks` is the shape of markers at the points, '' for none. `hover` has one text for each point.
    """
    look = {"color": COLORS[index % len(COLORS)]}
    places = _plain(x)
    trace = {
        "type": "scatter",
        "mode": "lines+markers" if marks or len(places) == 1 else "lines",  # a line of one point is invisible
        "name": name,
        "x": places,
        "y": _plain(y),
        "line": {**look, "width": 1.6, "dash": dash or "solid"},
        "marker": {**look, "size": 7, "symbol": marks or "circle"},
    }
    if hover:
        trace["text"] = list(hover)
    return trace


def points(
    name: str,
    x: Iterable[Any],
    y: Iterable[Any],
    index: int = 0,
    *,
    shape: str = "circle",
    hover: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a trace of points without a connecting line."""
    return {**line(name, x, y, index, marks=shape, hover=hover), "mode": "markers"}


def level(name: str, y: float, x: Sequence[float]) -> dict[str, Any]:
    """Return a grey horizontal line over the range of `x`, for a limit or an ideal value."""
    ends = [min(x), max(x)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": ends,
        "y": [y, y],
        "line": {"color": "#888", "width": 1.2, "dash": "dash"},
    }


def figures(charts: Iterable[Chart]) -> str:
    """Return HTML of several charts, side by side if the window is wide enough. '' if Plotly is not installed."""
    drawn = "".join(map(figure, charts))
    return f"<div class=figures>{drawn}</div>" if drawn else ""


def figure(chart: Chart) -> str:
    """Return HTML of one chart. '' if Plotly is not installed."""
    if not can_draw():
        return ""
    grid = {"automargin": True, "gridcolor": "#8884", "zerolinecolor": "#8884"}
    legend = sum(bool(trace.get("showlegend", True)) for trace in chart.traces) > 1
    log_x = _powers(chart) if chart.log_x else {}
    log_y = _decades(chart) if chart.log_y else {}
    layout = {
        "xaxis": {**grid, "title": {"text": text(chart.x)}, **log_x},
        # with a standoff, the title does not overlap long labels
        "yaxis": {**grid, "title": {"text": text(chart.y), "standoff": 8}, **log_y},
        "legend": {"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0},
        "margin": {"l": 50, "r": 12, "t": 30, "b": 90 if legend else 45},
        "height": chart.height_px,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "showlegend": legend,
    }
    for name, value in chart.layout.items():
        old = layout.get(name)
        layout[name] = {**old, **value} if isinstance(old, dict) else value
    content = strict_json({"data": chart.traces, "layout": layout}, indent=None).replace("</", "<\\/")
    return (
        f"<figure><figcaption>{text(chart.title)}</figcaption><div class=chart></div><script "
        f'type="application/json" class=figure>{content}</script></figure>'
    )


def _decades(chart: Chart) -> dict[str, Any]:
    """Return a logarithmic axis with labels at 1, 2 and 5 times powers of ten, or only at powers if these are many.

    Below half a decade Plotly chooses the labels. Between half a decade and one, Plotly would abbreviate 20,000 to 2.
    """
    values = [value for trace in chart.traces for value in trace["y"] if value and value > 0]
    if not values or max(values) < 3 * min(values):
        return {"type": "log"}
    first = math.floor(math.log10(min(values)))
    last = math.ceil(math.log10(max(values)))
    factors: tuple[float, ...] = (1, 2, 5) if last - first <= 3 else (1,)
    if max(values) < 10 * min(values):
        factors = (1, 1.5, 2, 3, 4, 5, 7)
    shown = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    return {"type": "log", "tickvals": shown, "ticktext": [f"{value:,g}" for value in shown]}


def _powers(chart: Chart) -> dict[str, Any]:
    """Return a logarithmic axis with labels at some of the values, such as numbers of devices.

    Two labels are at least a ninth of the axis apart, so that they do not overlap.
    """
    values = sorted({value for trace in chart.traces for value in trace["x"]})
    factor = (values[-1] / values[0]) ** (1 / 9)
    shown = values[:1]
    for value in values[1:]:
        if value >= shown[-1] * factor:
            shown.append(value)
    return {"type": "log", "tickvals": shown, "ticktext": [f"{value:,g}" for value in shown]}


def _plain(values: Iterable[Any]) -> list[Any]:
    """Return a list that the JSON encoder accepts: numpy numbers become Python numbers."""
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _wraps(cell: object) -> str:
    """Return the class of a cell whose text is so long that it is broken into lines."""
    return " class=long" if len(str(cell)) > LONGEST_LINE else ""


def table(head: Iterable[object], rows: Iterable[Iterable[object]], classes: Iterable[str] = ()) -> str:
    """Return an HTML table that scrolls sideways in a narrow window. `classes` has one CSS class for each row."""

    def row(tag: str, cells: Iterable[object], name: str = "") -> str:
        style = f" class={name}" if name else ""
        content = "".join(f"<{tag}{_wraps(cell)}>{text(cell)}</{tag}>" for cell in cells)
        return f"<tr{style}>{content}</tr>"

    names = [*classes]
    body = "".join(row("td", cells, names[index] if names else "") for index, cells in enumerate(rows))
    return f"<div class=wide><table>{row('th', head)}{body}</table></div>"


def tiles(numbers: Iterable[tuple[object, object]]) -> str:
    """Return HTML with one box for each pair (value, label)."""
    boxes = "".join(f"<div class=tile><b>{text(value)}</b><span>{text(what)}</span></div>" for value, what in numbers)
    return f"<div class=tiles>{boxes}</div>"


def text(value: object) -> str:
    """Return the value as escaped HTML text."""
    return html.escape(str(value))


def can_draw() -> bool:
    """Return whether the `plotly` package, which contains Plotly's script, is installed."""
    return find_spec("plotly") is not None


def write_page(path: Path, title: str, subtitle: str, parts: Iterable[str], *, has_figures: bool = True) -> Path:
    """Write a self-contained page and return `path`.

    With `has_figures`, warns if figures are left out because Plotly is not installed.
    """
    body = "\n".join(parts)
    script = ""
    if has_figures and not can_draw():
        missing = not_installed("plotly")
        log.warn(f"{path} has no figures: {missing.what} ({missing.fix})")
        subtitle = f"{subtitle} No figures: {missing.what}."
    elif "class=chart" in body:
        plotly = (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
        script = f"<script>{plotly}</script><script>{DRAW}</script>"
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><title>{text(title)}</title>'
    )
    top = f"<h1>{text(title)}</h1><p class=sub>{text(subtitle)}</p>"
    page = (
        f"<!doctype html>\n<html "
        f'lang="en"><head>{head}<style>{CSS}</style></head>\n<body>{top}\n{body}{script}</body></html>\n'
    )
    write_atomically(path, page)
    return path
