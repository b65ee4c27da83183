"""report.html: a run's curves, numbers and layout in one self-contained file; reads only what run directories hold."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from frontier_llm import log
from frontier_llm.blueprint import StageSpec, matrix_parameters
from frontier_llm.config import RunConfig
from frontier_llm.errors import not_installed
from frontier_llm.measure.latency import communication_section, table
from frontier_llm.measure.run_record import LayoutSpan, RunRecord, read_run, told_apart
from frontier_llm.schedule import build as build_schedule
from frontier_llm.schedule import render_figure, simulate
from frontier_llm.topology import Grid
from frontier_llm.units import format_count

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2")
CSS = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6b7b; --line: #d9e0e7; --card: #fff; --page: #f5f7f9 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --soft: #9aa8b5; --line: #33404c; --card: #1b232b; --page: #12181e } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto; max-width: 1080px; padding: 2rem }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem } p.sub { color: var(--soft); margin: .2rem 0 1.5rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem }
.tile, figure, table, pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px }
.tile { padding: .7rem 1rem } .tile b { display: block; font-size: 1.35rem } .tile span { color: var(--soft); font-size: .85rem }
figure { margin: 0; padding: .6rem; background: #fff } figure svg { width: 100%; height: auto }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: .8rem }
table { border-collapse: collapse; width: 100% } td, th { padding: .35rem .8rem; text-align: left; border-top: 1px solid var(--line) }
tr:first-child td, tr:first-child th { border-top: 0 }
pre { padding: .8rem 1rem; overflow-x: auto; white-space: pre-wrap }
.mesh { display: flex; gap: .5rem; overflow-x: auto } .stage { flex: 1; border: 1px solid var(--line); border-radius: 8px; padding: .5rem;
 background: var(--card) }
.rank { display: inline-block; border-radius: 5px; padding: .1rem .5rem; margin: .12rem; color: #fff; font-size: .85rem }
"""


def write_report(runs: Sequence[Path], output: Path, sample: str | None = None, next_command: str | None = None) -> Path:
    """One page over one or several runs of the same model (their curves share the axes); returns `output`."""
    records = told_apart([read_run(run) for run in runs])
    first = records[0]
    parts = [
        f"<h1>{_text(first.config.model.name)}</h1>",
        f"<p class=sub>{_text(_model_line(first.config))}</p>",
        _tiles(records),
        f"<h2>Curves</h2>{_curves(records)}",
        _experts(records),
        *(_layout(record, part) for record in records for part in record.parts),
        *(communication_section(_of_run(record, record.moved_on.name), record.operations) for record in records if record.operations),
        _table(records),
    ]
    if sample:
        parts.append(f"<h2>A generated sample</h2><pre>{_text(sample)}</pre>")
    if next_command:
        parts.append(f"<h2>Next</h2><pre>{_text(next_command)}</pre>")
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(first.config.model.name)}</title>'
    page = f'<!doctype html>\n<html lang="en"><head>{head}<style>{CSS}</style></head>\n<body>{body}</body></html>\n'
    output.write_text(page, encoding="utf-8")
    if not _can_draw():
        missing = not_installed("matplotlib")
        log.warn(f"{output} has no figures: {missing.what} ({missing.fix})")
    return output


def _text(value: object) -> str:
    return html.escape(str(value))


def _model_line(config: RunConfig) -> str:
    model = config.model
    parts = [f"{model.layers} layers", f"hidden {model.hidden}", f"{model.heads} heads", f"vocabulary {model.vocab_size:,}"]
    parts += [f"sequence {model.sequence_length}", f"{format_count(matrix_parameters(model))} weights per token", config.precision.dtype]
    return " · ".join(parts)


def _tiles(records: Sequence[RunRecord]) -> str:
    first = records[0]
    tiles = []
    if len(first.evaluations) > 1:
        before, after = first.evaluations[0], first.evaluations[-1]
        for key, what in (("loss", "held-out loss"), ("bits_per_byte", "bits per byte")):
            if key in after:
                tiles.append((f"{after[key]:.3f}", f"{what} ({before[key]:.3f} at step {before['step']})"))
    if first.steps:
        last = first.steps[-1]
        tiles.append((f"{last['loss']:.3f}", f"training loss after step {last['step']}"))
        tiles.append((format_count(last["consumed_tokens"]), "tokens seen"))
        since = first.parts[-1].after_step
        speeds = [step["tokens_per_s"] for step in first.steps if step["step"] > since]
        if speeds:
            tiles.append((f"{median(speeds):,.0f}", f"tokens/s (median{f' since step {since}' if since else ''})"))
    boxes = "".join(f"<div class=tile><b>{value}</b><span>{_text(what)}</span></div>" for value, what in tiles)
    return f"<div class=tiles>{boxes}</div>"


def _can_draw() -> bool:
    return find_spec("matplotlib") is not None


def _curves(records: Sequence[RunRecord]) -> str:
    if not _can_draw():
        return f"<p class=sub>No figures: {_text(not_installed('matplotlib').what)}.</p>"
    names = {"loss": "loss, nats per token", "gradient_norm": "gradient norm", "tokens_per_s": "tokens per second"}
    figures = [_plot(records, key, title) for key, title in {**names, "learning_rate": "learning rate"}.items()]
    return f"<div class=figures>{''.join(f'<figure>{svg}</figure>' for svg in figures)}</div>"


def _plot(records: Sequence[RunRecord], key: str, title: str) -> str:
    """One figure over all runs as inline SVG; the dots on the loss are held-out values."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2))
    axes = figure.subplots()
    for index, record in enumerate(records):
        color, style = COLORS[index % len(COLORS)], ("-", "--", ":", "-.")[index % 4]
        marker = "." if len(record.steps) == 1 else ""  # a line of one point would not be seen
        axes.plot(*_points(record.steps, key), style, marker=marker, color=color, label=record.name, linewidth=1.4)
        if key == "loss" and record.evaluations:  # "_": not in the legend
            label = "_" if index else "held out"
            axes.plot(*_points(record.evaluations, key), "o", color=color, markersize=4, label=label)
    for part in (part for record in records for part in record.parts if part.after_step):
        axes.axvline(part.after_step, color="#888", linestyle=":", linewidth=1)
        axes.text(part.after_step, 0.98, f" {part.name}", transform=axes.get_xaxis_transform(), rotation=90, va="top", fontsize=6)
    axes.set(title=title, xlabel="step")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return _svg(lambda file: figure.savefig(file, format="svg", bbox_inches="tight"))


def _experts(records: Sequence[RunRecord]) -> str:
    """How evenly routers have shared out tokens: the worst layer's busiest expert, the mean entropy, and the rows of each expert at last."""
    routed = [record for record in records if any("routing" in step for step in record.steps)]
    if not routed or not _can_draw():
        return ""
    from matplotlib.figure import Figure

    def drawn(title: str, draw: Callable[[Any, RunRecord, str], object]) -> str:
        figure = Figure(figsize=(6, 3.2))
        axes = figure.subplots()
        for index, record in enumerate(routed):
            draw(axes, record, COLORS[index % len(COLORS)])
        axes.set(title=title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
        return f"<figure>{_svg(lambda file: figure.savefig(file, format='svg', bbox_inches='tight'))}</figure>"

    def over_steps(of: Callable[[dict[str, Any]], float]) -> Callable[[Any, RunRecord, str], object]:
        def draw(axes: Any, record: RunRecord, color: str) -> object:
            rows = [step for step in record.steps if "routing" in step]
            axes.set_xlabel("step")
            marker = "." if len(rows) == 1 else ""
            values = [of(row["routing"]) for row in rows]
            return axes.plot([row["step"] for row in rows], values, marker=marker, color=color, label=record.name, linewidth=1.4)

        return draw

    def at_last(axes: Any, record: RunRecord, color: str) -> object:
        rows = next(step["routing"]["rows_per_expert"] for step in reversed(record.steps) if "routing" in step)
        axes.set_xlabel("expert")
        return axes.bar(range(len(rows)), rows, color=color, alpha=0.6, label=record.name)

    figures = (
        drawn("rows of the busiest expert over the mean, worst layer", over_steps(lambda routing: max(routing["largest_over_mean"]))),
        drawn("entropy of the router's scores, nats, mean of layers", over_steps(lambda routing: fmean(routing["entropy"]))),
        drawn("rows of each expert in the last step, all layers", at_last),
    )
    return f"<h2>Experts</h2><div class=figures>{''.join(figures)}</div>"


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps, and the values there."""
    return [row["step"] for row in rows], [row[key] for row in rows]


def _svg(write: Callable[[io.StringIO], object]) -> str:
    buffer = io.StringIO()
    write(buffer)
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # without the XML prologue, which HTML has no place for


def _contents(piece: StageSpec) -> str:
    first, last = piece.first_layer, piece.first_layer + piece.num_layers - 1
    layers = f"layers {first}-{last}" if last > first else f"layer {first}"
    return " + ".join(["embedding"] * piece.embedding + [layers] + ["head"] * piece.head)


def _chip(grid: Grid, place: Mapping[str, int]) -> str:
    axes = [axis for axis in ("tp", "cp", "dp") if axis != "cp" or grid.cp > 1]
    where = " ".join(f"{axis} {place[axis]}" for axis in axes)
    return f'<span class=rank style="background:{COLORS[place["dp"] % len(COLORS)]}">rank {grid.global_rank(place)}: {where}</span>'


def _of_run(record: RunRecord, text: str) -> str:
    """With the run's own name, where it has one besides that of its layout."""
    own = record.name.rpartition(", ")[0]
    return f"{text}, {own}" if own else text


def _layout(record: RunRecord, part: LayoutSpan) -> str:
    """Which rank holds what, and the schedule that was played, drawn with forward 1 and backward 2 units long."""
    plan, grid = part.plan, part.plan.grid
    stages = []
    for pp in range(grid.pp):
        what = "; ".join(map(_contents, plan.stages_of(pp)))
        rows = [
            "".join(_chip(grid, {"tp": tp, "cp": cp, "dp": dp, "pp": pp}) for tp in range(grid.tp))
            for dp in range(grid.dp)
            for cp in range(grid.cp)
        ]
        stages.append(f"<div class=stage><b>stage {pp}</b><br>{_text(what)}<br>{'<br>'.join(rows)}</div>")
    schedule = build_schedule(plan.schedule, grid.pp, plan.microbatches, plan.chunks)
    timeline = simulate(schedule, lambda stage, action: 1.0 if action.kind.value == "F" else 2.0)
    picture = f"<figure>{_svg(lambda file: render_figure(timeline, file, 'svg'))}</figure>" if grid.pp > 1 and _can_draw() else ""
    note = "<p class=sub>The schedule's timeline, simulated with a forward of 1 and a backward of 2 units.</p>" if picture else ""
    when = f" after step {part.after_step}" if len(record.parts) > 1 or part.after_step else ""
    title = f"Layout{when}: {_of_run(record, plan.describe())}"
    return f"<h2>{_text(title)}</h2><div class=mesh>{''.join(stages)}</div>{note}{picture}"


def _table(records: Sequence[RunRecord]) -> str:
    head = ("run", "layout", "steps", "last loss", "held out", "skipped")
    rows = []
    for record in records:
        last = record.steps[-1] if record.steps else {}
        loss, held_out = (f"{row['loss']:.4f}" if row else "-" for row in (last, record.evaluations[-1] if record.evaluations else {}))
        layouts = ", then ".join(name for name, _ in groupby(record.parts, key=lambda part: part.name))
        rows.append([record.directory.name, layouts, last.get("step", 0), loss, held_out, last.get("skipped_steps", 0)])
    return f"<h2>Runs</h2>{table(head, rows)}"
