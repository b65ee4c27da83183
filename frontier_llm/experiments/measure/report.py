"""Report about runs as one self-contained HTML page (report.html): curves, numbers and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from frontier_llm.blueprint.parameters import StageSpec
from frontier_llm.blueprint.work import matrix_parameters
from frontier_llm.config import RunConfig, dump
from frontier_llm.data.recorded import epochs_read, tokens_read
from frontier_llm.experiments.measure.predicted import beside_prediction
from frontier_llm.experiments.measure.run_record import LayoutSpan, RunRecord, read_run, told_apart
from frontier_llm.pages import COLORS, DASHES, Chart, figure, figures, line, points, table, text, tiles, write_page
from frontier_llm.run import stage_memory
from frontier_llm.schedule import build as build_schedule
from frontier_llm.schedule import simulate, timeline_chart
from frontier_llm.topology.grid import Grid
from frontier_llm.units import format_bytes, format_count, format_seconds

# curves over steps: key in metrics.jsonl, title, label of the vertical axis, factor on the values
CURVES = (
    ("loss", "Loss", "nats per token", 1),
    ("gradient_norm", "Gradient norm before clipping", "norm", 1),
    ("tokens_per_s", "Throughput", "tokens per second", 1),
    ("mfu", "Share of the device's peak (MFU)", "%", 100),
    ("memory_gib", "Peak memory of rank 0", "GiB", 1),
    ("learning_rate", "Learning rate", "learning rate", 1),
)


def write_report(
    runs: Sequence[Path],
    output: Path,
    sample: str | None = None,
    next_command: str | None = None,
    plugins: Sequence[str] = (),
    machine: str | None = None,
) -> Path:
    """Write one page about one or several runs of the same model, whose curves share the axes. Returns `output`.

    `plugins` is passed to `read_run`. With a machine, the page has the step times that its file predicts.
    """
    records = told_apart([read_run(run, plugins) for run in runs])
    first = records[0]
    parts = [
        _tiles(records),
        f"<h2>Curves</h2>{figures(_curves(records))}",
        _predicted(records, machine, plugins) if machine else "",
        _memory(records),
        _experts(records),
        *(_layout(record, part) for record in records for part in record.parts),
    ]
    for record in records:
        if record.operations:
            parts.append(communication_section(_of_run(record, record.moved_on.name), record.operations))
    parts.append(_runs(records))
    for record in records:
        title = f"<summary>Configuration of {text(record.name)}</summary>"
        parts.append(f"<details>{title}<pre>{text(dump(record.config))}</pre></details>")
    if sample:
        parts.append(f"<h2>A generated sample</h2><pre>{text(sample)}</pre>")
    if next_command:
        parts.append(f"<h2>Next</h2><pre>{text(next_command)}</pre>")
    return write_page(output, first.config.model.name, _model_line(first.config), parts)


def _model_line(config: RunConfig) -> str:
    model = config.model
    parts = [
        f"{model.layers} layers",
        f"hidden {model.hidden}",
        f"{model.heads} heads",
        f"vocabulary {model.vocab_size:,}",
        f"sequence {model.sequence_length}",
        f"{format_count(matrix_parameters(model))} weights per token",
        config.precision.dtype,
    ]
    return " · ".join(parts)


def _tiles(records: Sequence[RunRecord]) -> str:
    first = records[0]
    numbers = []
    if len(first.evaluations) > 1:
        before = first.evaluations[0]
        after = first.evaluations[-1]
        for key, what in (("loss", "held-out loss"), ("bits_per_byte", "bits per byte")):
            if key in after:
                numbers.append((f"{after[key]:.3f}", f"{what} ({before[key]:.3f} at step {before['step']})"))
    if first.steps:
        last = first.steps[-1]
        numbers.append((f"{last['loss']:.3f}", f"training loss after step {last['step']}"))
        numbers.append((format_count(last["consumed_tokens"]), "tokens seen"))
        since = first.parts[-1].after_step
        speeds = [step["tokens_per_s"] for step in first.steps if step["step"] > since]
        if speeds:
            numbers.append((f"{median(speeds):,.0f}", f"tokens/s (median{f' since step {since}' if since else ''})"))
    return tiles(numbers)


def _predicted(records: Sequence[RunRecord], machine: str, plugins: Sequence[str]) -> str:
    """Return a table and a chart of the step times that the planner predicts and of the measured medians."""
    runs = [beside_prediction(record.directory, machine, plugins=plugins) for record in records]
    names = [record.name for record in records]
    rows = [
        (name, format_seconds(run.predicted_s), format_seconds(run.measured_s), f"{100 * run.error:+.1f} %")
        for name, run in zip(names, runs, strict=True)
    ]
    times = {"predicted": [run.predicted_s for run in runs], "measured": [run.measured_s for run in runs]}
    colors = {"predicted": COLORS[7], "measured": COLORS[2]}  # other charts use the first two colours for runs
    bars = [
        {"type": "bar", "name": name, "x": names, "y": values, "marker": {"color": colors[name]}}
        for name, values in times.items()
    ]
    chart = figure(Chart("Time of a step", "", "seconds", bars))
    return f"<h2>Predicted for {text(machine)} and measured</h2>{table(_PREDICTED_HEAD, rows)}{chart}"


def _memory(records: Sequence[RunRecord]) -> str:
    """Return a table of each run's predicted and measured memory by pipeline stage. '' if no run has measured it."""
    parts = []
    for record in records:
        if record.memory:
            head, rows = stage_memory.table(record.memory)
            parts.append(f"<p>{text(record.name)}: {stage_memory.meaning(record.memory)}</p>")
            parts.append(table([title.removeprefix(">") for title in head], rows))
    return f"<h2>Memory after the first steps</h2>{''.join(parts)}" if parts else ""


_PREDICTED_HEAD = ("run", "predicted", "measured", "error")


def _curves(records: Sequence[RunRecord]) -> Iterator[Chart]:
    for key, title, unit, factor in CURVES:
        if any(key in step and step[key] is not None for record in records for step in record.steps):
            yield _curve(records, key, title, unit, factor)
            if key == "loss":
                yield from _difference(records)
    if tasks := _tasks(records):
        yield tasks
    for record in records:
        if sum(bool(step.get("phases_s")) for step in record.steps) > 1:
            yield _phases(record)


def _curve(records: Sequence[RunRecord], key: str, title: str, unit: str, factor: float) -> Chart:
    """Return a figure with the curve of each run. Dots are held-out losses, vertical lines changes of the layout."""
    traces = []
    for index, record in enumerate(records):
        rows = [step for step in record.steps if step.get(key) is not None]
        seen = [f"{format_count(row['consumed_tokens'])} tokens" for row in rows]
        values = [row[key] * factor for row in rows]
        traces.append(line(record.name, _steps(rows), values, index, dash=DASHES[index % len(DASHES)], hover=seen))
        if key == "loss":
            for number, held_out in enumerate(_held_out(record)):
                rows = [row for row in record.evaluations if held_out in row]
                name = held_out if held_out != "loss" else "held out"
                # different markers for different runs and sets, so that coinciding points stay visible
                shape = SHAPES[(index + number) % len(SHAPES)]
                traces.append(
                    points(f"{name}, {record.name}", _steps(rows), [row[held_out] for row in rows], index, shape=shape)
                )
            losses = {result.step: result.losses for result in record.evaluated}
            for number, (dataset, steps, values) in enumerate(_by_name(losses)):
                shape = SHAPES[(index + number + 1) % len(SHAPES)]
                traces.append(points(f"{dataset} (evaluate), {record.name}", steps, values, index, shape=shape))
    return Chart(title, "step", unit, traces, layout=_changes(records))


def _changes(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return vertical lines, with a label beside each, at the steps after which a layout or a blend changed."""
    changes: dict[int, list[str]] = {}
    for record in records:
        told = [(part.after_step, part.name) for part in record.parts[1:]]
        told += [(step, "new blend") for step in record.blend_changes]
        for step, what in told:
            changes.setdefault(step, []).append(_of_run(record, what))
    lines = [{"x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper", "line": _THIN} for step in changes]
    names = [{"x": step, "y": 1, "text": "; ".join(what), **_BESIDE_LINE} for step, what in changes.items()]
    return {"shapes": lines, "annotations": names}


def _difference(records: Sequence[RunRecord]) -> Iterator[Chart]:
    """Yield a figure of the training losses minus the loss of the first run, if two recorded steps are in common."""
    first, *others = records
    reference = {step["step"]: step["loss"] for step in first.steps if step.get("loss") is not None}
    traces = []
    for index, record in enumerate(others, start=1):
        rows = [step for step in record.steps if step["step"] in reference and step.get("loss") is not None]
        differences = [row["loss"] - reference[row["step"]] for row in rows]
        if len(rows) > 1:
            traces.append(line(record.name, _steps(rows), differences, index))
    if traces:
        yield Chart(f"Training loss minus that of {first.name}", "step", "nats per token", traces)


def _held_out(record: RunRecord) -> list[str]:
    """Return the keys of the held-out losses: one per named set, or "loss" if sets have no names."""
    named = [key for row in record.evaluations for key in row if key.startswith("validation/")]
    return list(dict.fromkeys(named)) or ["loss"]


def _tasks(records: Sequence[RunRecord]) -> Chart | None:
    """Return a chart of each in-context task's accuracy, with a colour per task and a dash style per run.

    Accuracies during training are connected, and results of `evaluate` are points. None if no run has any.
    """
    during = [{row["step"]: row["accuracy"] for row in record.tasks} for record in records]
    beside = [{result.step: result.accuracies for result in record.evaluated} for record in records]
    names = list(dict.fromkeys(name for by_step in (*during, *beside) for name, _, _ in _by_name(by_step)))
    traces = []
    for index, record in enumerate(records):
        for name, steps, accuracies in _by_name(during[index]):
            dash = DASHES[index % len(DASHES)]
            traces.append(line(f"{name}, {record.name}", steps, accuracies, names.index(name), dash=dash))
        for name, steps, accuracies in _by_name(beside[index]):
            shape = SHAPES[index % len(SHAPES)]
            title = f"{name} (evaluate), {record.name}"
            traces.append(points(title, steps, accuracies, names.index(name), shape=shape))
    return Chart("Accuracy of in-context tasks", "step", "share of questions", traces) if traces else None


def _by_name(by_step: Mapping[int, Mapping[str, float]]) -> list[tuple[str, list[int], list[float]]]:
    """Return (name, steps, values) of each name that occurs in a mapping from steps to named values."""
    names = dict.fromkeys(name for values in by_step.values() for name in values)
    series = []
    for name in names:
        steps = [step for step, values in by_step.items() if name in values]
        series.append((name, steps, [by_step[step][name] for step in steps]))
    return series


SHAPES = ("diamond", "circle-open", "square-open", "triangle-up-open")
_THIN = {"color": "#888", "width": 1, "dash": "dot"}
_BESIDE_LINE = {
    "yref": "paper",
    "yanchor": "top",
    "xanchor": "left",
    "xshift": 2,
    "textangle": 90,
    "showarrow": False,
    "font": {"size": 10},
}


def _phases(record: RunRecord) -> Chart:
    """Return a chart that divides rank 0's time in each step into phases."""
    rows = [step for step in record.steps if step.get("phases_s")]
    names = list(dict.fromkeys(name for row in rows for name in row["phases_s"]))
    traces = []
    for index, name in enumerate(names):
        times_ms = [1e3 * row["phases_s"].get(name, 0.0) for row in rows]
        traces.append({**line(name, _steps(rows), times_ms, index), "stackgroup": "step"})
    return Chart(f"Phases of the step on rank 0: {record.name}", "step", "milliseconds", traces)


def _experts(records: Sequence[RunRecord]) -> str:
    """Return charts of how evenly the routers distribute tokens, or '' if no run has experts."""
    routed = []
    for index, record in enumerate(records):
        rows = [step for step in record.steps if "routing" in step]
        if rows:
            routed.append((index, record.name, rows))
    if not routed:
        return ""

    def over_steps(title: str, unit: str, value_of: Callable[[Mapping[str, Any]], float]) -> Chart:
        traces = []
        for index, name, rows in routed:
            values = [value_of(row["routing"]) for row in rows]
            traces.append(line(name, _steps(rows), values, index))
        return Chart(title, "step", unit, traces)

    loads = []
    for index, name, rows in routed:
        counts = rows[-1]["routing"]["rows_per_expert"]
        loads.append(points(name, range(len(counts)), counts, index))
    charts = (
        over_steps(
            "Busiest expert of the most unbalanced layer",
            "rows, relative to the mean of the experts",
            lambda routing: max(routing["largest_over_mean"]),
        ),
        over_steps("Entropy of the routers' scores, mean of layers", "nats", lambda routing: fmean(routing["entropy"])),
        Chart("Load in the last step", "expert", "rows, all layers", loads),
    )
    return f"<h2>Experts</h2>{figures(charts)}"


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


def _contents(piece: StageSpec) -> str:
    first = piece.first_layer
    last = piece.first_layer + piece.num_layers - 1
    layers = f"layers {first}-{last}" if last > first else f"layer {first}"
    return " + ".join(["embedding"] * piece.embedding + [layers] + ["head"] * piece.head)


def _chip(grid: Grid, place: Mapping[str, int]) -> str:
    axes = [axis for axis in ("tp", "cp", "dp") if axis != "cp" or grid.cp > 1]
    where = " ".join(f"{axis} {place[axis]}" for axis in axes)
    return (
        f'<span class=rank style="background:{COLORS[place["dp"] % len(COLORS)]}">rank {grid.global_rank(place)}: '
        f"{where}</span>"
    )


def _of_run(record: RunRecord, text: str) -> str:
    """Append the directory's name to `text` if the figures name the run by directory and layout, not by layout only."""
    own = record.name.rpartition(", ")[0]
    return f"{text}, {own}" if own else text


def _layout(record: RunRecord, part: LayoutSpan) -> str:
    """Return HTML with the layers of each rank and the schedule, drawn with forward 1 and backward 2 units long."""
    plan = part.plan
    grid = part.plan.grid
    stages = []
    for pp in range(grid.pp):
        what = "; ".join(map(_contents, plan.stages_of(pp)))
        rows = [
            "".join(_chip(grid, {"tp": tp, "cp": cp, "dp": dp, "pp": pp}) for tp in range(grid.tp))
            for dp in range(grid.dp)
            for cp in range(grid.cp)
        ]
        stages.append(f"<div class=stage><b>stage {pp}</b><br>{text(what)}<br>{'<br>'.join(rows)}</div>")
    schedule = build_schedule(plan.schedule, grid.pp, plan.microbatches, plan.chunks)
    timeline = simulate(schedule, lambda stage, action: 1.0 if action.kind.value == "F" else 2.0)
    picture = figure(timeline_chart(timeline, "units of time")) if grid.pp > 1 else ""
    note = (
        "<p class=sub>The schedule's timeline, simulated with a forward of 1 and a backward of 2 units; grey is "
        "idle.</p>"
        if picture
        else ""
    )
    when = f" after step {part.after_step}" if len(record.parts) > 1 or part.after_step else ""
    title = f"Layout{when}: {_of_run(record, plan.describe())}"
    return f"<h2>{text(title)}</h2><div class=mesh>{''.join(stages)}</div>{note}{picture}"


def _runs(records: Sequence[RunRecord]) -> str:
    head = ("run", "layout", "steps", "last loss", "held out", "skipped")
    rows = []
    for record in records:
        last = record.steps[-1] if record.steps else {}
        last_evaluation = record.evaluations[-1] if record.evaluations else {}
        loss, held_out = (f"{row['loss']:.4f}" if row else "-" for row in (last, last_evaluation))
        layouts = ", then ".join(name for name, _ in groupby(record.parts, key=lambda part: part.name))
        rows.append([record.directory.name, layouts, last.get("step", 0), loss, held_out, last.get("skipped_steps", 0)])
    return f"<h2>Runs</h2>{table(head, rows)}{_data(records)}"


def _data(records: Sequence[RunRecord]) -> str:
    """Return a table and a chart of the number of tokens that each run has read from each of its datasets."""
    rows = []
    traces = []
    for index, record in enumerate(records):
        tokens = tokens_read(record.directory)
        epochs = epochs_read(record.directory)
        rows += [
            (record.directory.name, path, format_count(count), f"{epochs[path]:.3g}" if path in epochs else "-")
            for path, count in tokens.items()
        ]
        if tokens:
            bar = {"type": "bar", "name": record.name, "x": list(tokens), "y": list(tokens.values())}
            traces.append({**bar, "marker": {"color": COLORS[index % len(COLORS)]}})
    if not rows:
        return ""
    has_blend = len(dict.fromkeys(row[1] for row in rows)) > 1  # a run with one source needs no chart
    chart = figure(Chart("Tokens read by source", "", "tokens", traces)) if has_blend else ""
    return f"<h2>Data</h2>{table(('run', 'source', 'tokens', 'epochs'), rows)}{chart}"


def by_axis(operations: Mapping[str, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return axis → histogram of blocked times: bin k counts calls that blocked 2^(k-1) to 2^k microseconds.

    comm.ledger.Histogram defines the bins.
    """
    axes: dict[str, list[list[int]]] = {}
    for name, row in operations.items():
        axes.setdefault(name.split(" ")[0], []).append(row["bins"])
    return {axis: [sum(column) for column in zip(*rows, strict=True)] for axis, rows in axes.items()}


def communication_section(title: str, operations: Mapping[str, Mapping[str, Any]]) -> str:
    """Return HTML about the communication of one run.

    Blocked time is the time that rank 0 waited in a call. On a GPU it is the time that the host waited.
    """
    head = ("axis", "operation", "calls", "bytes", "blocked", "median", "99 %")
    rows = []
    for name, row in operations.items():
        axis, _, operation = name.partition(" ")
        calls = f"{row['calls']:,}"
        latencies = [f"< {format_seconds(row[key] * 1e-6)}" for key in ("p50_us", "p99_us")]
        rows.append([axis, operation, calls, format_bytes(row["bytes"]), format_seconds(row["blocked_s"]), *latencies])
    charts = [_calls(axis, bins) for axis, bins in by_axis(operations).items() if any(bins)]
    return f"<h2>Communication {text(title)}</h2>{table(head, rows)}{figures(charts)}"


def _calls(axis: str, bins: list[int]) -> Chart:
    """Return the histogram of an axis as a chart whose bins are powers of two in microseconds."""
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
    return Chart(
        f"How long calls of rank 0 blocked: {axis}", "upper limit of the blocked time", "calls", [trace], height_px=240
    )
