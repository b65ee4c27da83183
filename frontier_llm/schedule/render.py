"""Drawings of a timeline: text for terminals and documentation, SVG for notebooks, and a figure for HTML pages."""

from __future__ import annotations

from itertools import islice
from math import ceil
from typing import Any

from frontier_llm.pages import Chart, text
from frontier_llm.schedule.actions import Action, Kind, Placement, Schedule
from frontier_llm.schedule.simulate import Timeline
from frontier_llm.units import plural

COLORS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f58518",
    Kind.BACKWARD_INPUT: "#e45756",
    Kind.BACKWARD_WEIGHT: "#54a24b",
}


def render_text(timeline: Timeline, columns: int = 160) -> str:
    """Draw one line per stage, with time to the right and idle time as dots.

    Time is scaled so that the shortest action has exactly enough characters for its name. A line longer than `columns`
    characters is cut and ends with '…'. The last line gives makespan and bubble.
    """
    schedule = timeline.schedule
    spans = [span for stage in range(schedule.stages) for span in islice(timeline.spans(stage), columns)]
    column_s = min(
        (end_s - start_s) / (len(schedule.label(action)) + 1) for action, start_s, end_s in spans if end_s > start_s
    )
    label = len(f"stage {schedule.stages - 1}")
    lines = []
    for stage in range(schedule.stages):
        line = ""
        for action, start_s, end_s in timeline.spans(stage):
            begin = round(start_s / column_s)
            end = round(end_s / column_s)
            line = line.ljust(begin, "·") + schedule.label(action)[: end - begin].ljust(end - begin)
            if len(line) > columns:
                break
        line = line.ljust(ceil(timeline.makespan_s / column_s), "·")
        lines.append(f"{f'stage {stage}':<{label}} |" + (line if len(line) <= columns else line[: columns - 1] + "…"))
    chunks = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    size = f"{schedule.name}, {schedule.stages} stages{chunks}, {plural(schedule.microbatches, 'microbatch')}"
    return "\n".join(
        [*lines, f"{size}: makespan {timeline.makespan_s:.4g}, bubble {timeline.bubble_fraction:.1%} of compute"]
    )


SVG_WIDTH_PX = 900
SVG_ROW_PX = 22
SVG_MARGIN_PX = 70
MOST_ACTIONS = 6000  # largest number of actions of a schedule that are drawn


def timeline_svg(timeline: Timeline, title: str, unit: str) -> str:
    """Draw the timeline as SVG with one row per pipeline rank and a legend. It needs no script.

    If the schedule has more than MOST_ACTIONS actions, only the beginning is drawn.
    """
    schedule = timeline.schedule
    per_stage = MOST_ACTIONS // schedule.stages
    rows = [list(islice(timeline.spans(stage), per_stage)) for stage in range(schedule.stages)]
    drawn_until_s = max(end_s for spans in rows for *_, end_s in spans)
    px_per_s = (SVG_WIDTH_PX - SVG_MARGIN_PX) / drawn_until_s
    parts = [f'<text x="0" y="14" font-weight="600">{text(title)}</text>']
    for stage, spans in enumerate(rows):
        top_px = 24 + stage * SVG_ROW_PX
        parts.append(f'<text x="0" y="{top_px + 14}">rank {stage}</text>')
        idle_px = SVG_WIDTH_PX - SVG_MARGIN_PX
        parts.append(_rectangle(SVG_MARGIN_PX, top_px, idle_px, "#8883", "idle"))
        for action, start_s, end_s in spans:
            left_px = SVG_MARGIN_PX + start_s * px_per_s
            width_px = (end_s - start_s) * px_per_s
            note = f"{_words(action.kind)}, microbatch {action.microbatch}"
            parts.append(_rectangle(left_px, top_px, width_px, _color(action, schedule.placement), note))
    bottom_px = 24 + schedule.stages * SVG_ROW_PX
    parts.append(f'<text x="{SVG_MARGIN_PX}" y="{bottom_px + 14}">0 to {drawn_until_s:.4g} {text(unit)}</text>')
    kinds = sorted({action.kind for spans in rows for action, *_ in spans}, key=list(Kind).index)
    for index, kind in enumerate(kinds):
        left_px = SVG_MARGIN_PX + 240 + 150 * index
        parts.append(_rectangle(left_px, bottom_px + 3, 14, COLORS[kind], ""))
        parts.append(f'<text x="{left_px + 20}" y="{bottom_px + 14}">{_words(kind)}</text>')
    size = f'viewBox="0 0 {SVG_WIDTH_PX} {bottom_px + 22}" width="100%"'
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="currentColor"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>'


def _rectangle(left_px: float, top_px: float, width_px: float, color: str, note: str) -> str:
    """Return a rectangle of a timeline's row. Browsers show `note` under the pointer."""
    place = f'x="{left_px:.1f}" y="{top_px:.0f}" width="{width_px:.1f}" height="{SVG_ROW_PX - 4}"'
    return f'<rect {place} fill="{color}"><title>{text(note)}</title></rect>'


def _words(kind: Kind) -> str:
    return kind.name.lower().replace("_", " ")


def _color(action: Action, placement: Placement) -> str:
    """Return the kind's colour, lighter for a rank's later virtual stages."""
    lighter = 0.5 * (action.position * placement.chunks // len(placement.rank_of)) / placement.chunks
    parts = (int(COLORS[action.kind][index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * lighter):02x}" for part in parts)


def timeline_chart(timeline: Timeline, unit: str) -> Chart:
    """Draw the timeline as a figure with one row per pipeline rank.

    Idle time is grey. With at most 80 actions per rank on average, bars are labelled with their microbatch. If the
    schedule has more than MOST_ACTIONS actions, only the beginning is drawn.
    """
    schedule = timeline.schedule
    rows: dict[Kind, list[tuple[Action, int, float, float]]] = {}
    for stage in range(schedule.stages):
        for action, start_s, end_s in islice(timeline.spans(stage), MOST_ACTIONS // schedule.stages):
            rows.setdefault(action.kind, []).append((action, stage, start_s, end_s))
    drawn_until_s = max(end_s for spans in rows.values() for *_, end_s in spans)
    few = sum(map(len, rows.values())) <= 80 * schedule.stages
    idle = {"base": [0.0] * schedule.stages, "x": [drawn_until_s] * schedule.stages, "y": list(range(schedule.stages))}
    traces = [
        {"type": "bar", "orientation": "h", "name": "idle", "marker": {"color": "#8883"}, "hoverinfo": "skip", **idle}
    ]
    traces += [_bars(schedule, kind, rows[kind], few) for kind in Kind if kind in rows]
    chunks = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    size = f"{schedule.name}{chunks}, {plural(schedule.microbatches, 'microbatch')}"
    layout = {
        "barmode": "overlay",
        "bargap": 0.12,
        "yaxis": {"autorange": "reversed", "dtick": max(1, schedule.stages // 16), "showgrid": False},
        "xaxis": {"range": [0, drawn_until_s]},
    }
    title = f"{size}: bubble {timeline.bubble_fraction:.1%} of compute"
    return Chart(
        title=title,
        x=unit,
        y="pipeline rank",
        traces=traces,
        height_px=150 + min(28 * schedule.stages, 480),
        layout=layout,
    )


def _bars(
    schedule: Schedule,
    kind: Kind,
    spans: list[tuple[Action, int, float, float]],
    labelled: bool,
) -> dict[str, Any]:
    """Return all bars of one kind as one trace, which the legend can hide."""
    name = _words(kind)
    hover = [f"{name}, microbatch {action.microbatch}" for action, *_ in spans]
    if schedule.chunks > 1:
        positions = [action.position for action, *_ in spans]
        hover = [f"{words}, virtual stage {position}" for words, position in zip(hover, positions, strict=True)]
    bars = {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "base": [start_s for *_, start_s, _ in spans],
        "x": [end_s - start_s for *_, start_s, end_s in spans],
        "y": [stage for _, stage, *_ in spans],
        "marker": {
            "color": [_color(action, schedule.placement) for action, *_ in spans],
            "line": {"width": 0.4, "color": "#fff"},
        },
        "hovertext": hover,
        "hovertemplate": "%{hovertext}<br>%{base:.4g} + %{x:.4g}<extra></extra>",
    }
    if labelled:
        bars["text"] = [str(action.microbatch) for action, *_ in spans]
        bars |= {"textposition": "inside", "insidetextanchor": "middle"}
    return bars
