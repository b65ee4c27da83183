"""Figures of a search in one self-contained HTML page, and the simulated pipeline as a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from frontier_llm.blueprint.items import FlashCore, Pass, Product
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.work import block_work, flops
from frontier_llm.errors import ConfigError, not_installed
from frontier_llm.files import write_atomically
from frontier_llm.machine.load import rates
from frontier_llm.machine.rates import Rates
from frontier_llm.machine.schema import Machine
from frontier_llm.pages import PARTS, Chart, can_draw, figure, figures, level, line, points, text, write_page
from frontier_llm.planner import report
from frontier_llm.planner.algorithms import bucket_bytes, gradient_choices, times_by_nodes
from frontier_llm.planner.alternatives import alternatives
from frontier_llm.planner.breakdown import breakdown
from frontier_llm.planner.candidates import runnable_layouts
from frontier_llm.planner.costs.layouts import Layouts, as_table, ranks_per_node
from frontier_llm.planner.costs.memory import peak_memory
from frontier_llm.planner.costs.seconds import Prices, times, work_s
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.published import PUBLISHED
from frontier_llm.planner.search import Plan, Search
from frontier_llm.schedule import Kind, timeline_chart
from frontier_llm.units import GIB, format_bytes, strict_json

SLOWEST_SHOWN = 3.0  # slowest step in the chart of time against memory, relative to the fastest
SAME_EFFICIENCY = 0.01  # difference of two efficiencies that cannot be seen in a chart


def write_figures(path: Path, outcome: Search, machine: Machine, stack: str, numbers: Rates) -> Path:
    """Write the page of a search and return its path. Raises ConfigError if Plotly is not installed."""
    if not can_draw():
        raise ConfigError([not_installed("plotly", "--figures")])
    words = (
        report.text(outcome, machine, stack, numbers, None)
        + "\n\n"
        + report.explain(outcome.best, machine, stack, numbers)
    )
    title = f"{outcome.model.name} on {outcome.nodes} nodes of {machine.name}"
    candidates = candidates_of(outcome, numbers)
    parts = [
        figure(pipeline_chart(outcome.best)),
        figure(step_chart(outcome, numbers)),
        figure(time_memory_chart(outcome, candidates)),
        figure(memory_chart(outcome.best)),
        figure(roofline_chart(outcome.best, numbers)),
        figures(throughput_charts(outcome, candidates)),
        figures(scaling_charts(outcome, machine, numbers)),
    ]
    if gradient_choices(outcome.best, numbers):
        parts.append(figures(collective_charts(outcome.best, numbers)))
    parts.append(f"<h2>Report</h2><pre>{text(words)}</pre>")
    return write_page(path, title, "All values are simulated, except points that a legend calls measured.", parts)


def pipeline_chart(plan: Plan) -> Chart:
    """Return the timeline of the simulated part of the schedule, one row per pipeline rank."""
    chart = timeline_chart(plan.simulated.timeline, "seconds (simulated)")
    return replace(chart, title=report.layout_words(plan) + simulated_part(plan))


def simulated_part(plan: Plan) -> str:
    """Return a note with the number of simulated microbatches, or "" if the complete step was simulated."""
    simulated = plan.simulated.timeline.schedule.microbatches
    whole = plan.layout.microbatches
    if simulated < whole:
        return f": {simulated} of the {whole} microbatches; the pattern in the middle repeats"
    return ""


def step_chart(outcome: Search, numbers: Rates) -> Chart:
    """Return a stacked bar of the step's time by cause for the choice, the second-best plan and other kinds of plan."""
    compared = {"choice": outcome.best}
    if len(outcome.plans) > 1:
        compared["second best"] = outcome.plans[1]
    compared |= {other.name: other.plan for other in alternatives(outcome, numbers) if other.plan is not None}
    causes = {name: breakdown(plan, numbers) for name, plan in compared.items()}
    labels = [f"{name}<br>{_short(plan.layout)}" for name, plan in compared.items()]
    names = list(dict.fromkeys(name for parts in causes.values() for name in parts))
    largest = {name: max(parts.get(name, 0.0) / sum(parts.values()) for parts in causes.values()) for name in names}
    shown = [name for name in names if largest[name] > 0.01]
    small = [name for name in names if name not in shown]
    rows = {name: [parts.get(name, 0.0) for parts in causes.values()] for name in shown}
    rows["everything below 1 %"] = [sum(parts.get(name, 0.0) for name in small) for parts in causes.values()]
    traces = [
        _part(name, labels, values, PARTS[index % len(PARTS)]) for index, (name, values) in enumerate(rows.items())
    ]
    return Chart(
        title="Parts of a step's time",
        x="",
        y="seconds (simulated)",
        traces=traces,
        height_px=460,
        layout={"barmode": "stack", "xaxis": {"tickangle": 0}},
    )


def _short(layout: Layout) -> str:
    """Return the degrees of a layout in two lines, which fit below a bar of a narrow window."""
    context = f" CP{layout.cp}" if layout.cp > 1 else ""
    sharding = " FSDP" if layout.sharding == "weights" else ""
    return f"TP{layout.tp}{context} PP{layout.pp}<br>DP{layout.dp}{sharding}"


def memory_chart(plan: Plan) -> Chart:
    """Return a stacked chart of each pipeline rank's memory by purpose, with the device's limit."""
    ranks = list(range(len(plan.memory)))
    sizes = {name: [lines[name] / GIB for lines in plan.memory] for name in plan.memory[0]}
    traces = [
        _part(name, ranks, values, PARTS[index]) for index, (name, values) in enumerate(sizes.items()) if any(values)
    ]
    limit = level("device", plan.limit_bytes / GIB, [-0.5, len(ranks) - 0.5])
    return Chart(
        title="Memory per pipeline rank",
        x="pipeline rank",
        y="GiB",
        traces=[*traces, limit],
        height_px=380,
        layout={"barmode": "stack", "xaxis": {"dtick": max(1, len(ranks) // 16)}},
    )


def _part(name: str, ranks: Sequence[int | str], values: list[float], color: str) -> dict[str, Any]:
    marker = {"color": color, "line": {"color": "#888", "width": 0.5}}
    return {"type": "bar", "name": name, "x": ranks, "y": values, "marker": marker}


def _name_of_work(work: Product | FlashCore) -> str:
    if isinstance(work, Product):
        return work.parameter
    return "backward" if work.backward else "forward"


def roofline_chart(plan: Plan, numbers: Rates) -> Chart:
    """Return a roofline chart: FLOP/s of a block's kernels by their FLOPs per byte of memory traffic.

    The roofs are memory bandwidth and the peak of the matrix units, as in ORNL's figures. The star is the complete
    block: forward and backward of a microbatch, including communication and waiting. Only the causal half of
    attention's FLOPs is counted.
    """
    items = block_work(plan.model, plan.layout, numbers)
    prices: Prices = {}
    kernels: dict[str, dict[Product | FlashCore, None]] = {}
    for item in items:
        if isinstance(item.work, Product | FlashCore):
            kernels.setdefault(item.cause, {})[item.work] = None
    traces = []
    for index, (cause, works) in enumerate(kernels.items()):
        executed = [work.flops / (1 if isinstance(work, Product) else 2) for work in works]
        speeds = [
            count / work_s(work, plan.layout, numbers, prices) / 1e12
            for count, work in zip(executed, works, strict=True)
        ]
        places = [intensity(count, work.moved_bytes) for count, work in zip(executed, works, strict=True)]
        names = [_name_of_work(work) for work in works]
        traces.append(points(cause, places, speeds, index, hover=names))
    moved = sum(item.work.moved_bytes for item in items if isinstance(item.work, Product | FlashCore | Pass))
    block = times(plan.model, plan.layout, numbers).block
    whole = flops(items, causal=True)
    seconds = float(sum(block.both(plan.layout.microbatches, numbers)))
    traces.append(points("the complete block", [intensity(whole, moved)], [whole / seconds / 1e12], 3, shape="star"))
    shown = [value for trace in traces for value in trace["x"]]
    ridge = numbers.peak_flops / numbers.hbm_bytes_s
    ends = sorted({round(min(*shown, ridge) / 2, 1), round(ridge, 1), 2 * max(*shown, ridge)})
    roof = [min(numbers.peak_flops, place * numbers.hbm_bytes_s) / 1e12 for place in ends]
    axes = "FLOPs per byte of memory traffic", "TFLOP/s per device (simulated)"
    return Chart(
        "Roofline of a block",
        *axes,
        [*traces, line("the device", ends, roof, 7, dash="dash")],
        log_x=True,
        log_y=True,
    )


def intensity(executed: float, moved_bytes: float) -> float:
    """Return FLOPs per byte, rounded to three digits."""
    return float(f"{executed / moved_bytes:.3g}")


@dataclass(frozen=True)
class Candidates:
    """The layouts of a search that fit, with the seconds of a step in closed form and the memory of a device."""

    layouts: Layouts
    seconds: np.ndarray
    memory_gib: np.ndarray


def candidates_of(outcome: Search, numbers: Rates) -> Candidates:
    """Return all layouts of the search that fit."""
    chosen = outcome.best.layout
    layouts = runnable_layouts(
        outcome.model,
        numbers,
        outcome.nodes,
        outcome.global_batch,
        outcome.fixed,
        dtype=chosen.dtype,
        optimizer=chosen.optimizer,
    )
    memory = np.asarray(peak_memory(outcome.model, layouts, numbers))
    fits = memory <= numbers.memory_bytes
    layouts = layouts.where(fits)
    return Candidates(layouts, step_s(outcome.model, layouts, numbers), memory[fits] / GIB)


def time_memory_chart(outcome: Search, candidates: Candidates) -> Chart:
    """Return the seconds of a step against the memory of a device, for all layouts that fit.

    For each TP degree and each half GiB of memory only the fastest layout is drawn. Layouts that take more than
    SLOWEST_SHOWN times as long as the fastest layout are not drawn. A star marks the simulated choice.
    """
    layouts = candidates.layouts
    bins = np.round(2 * candidates.memory_gib)
    is_shown = candidates.seconds <= SLOWEST_SHOWN * candidates.seconds.min()
    traces = []
    degrees = np.asarray(layouts.tp)
    for series, tp in enumerate(np.unique(degrees[is_shown])):
        own = np.flatnonzero(is_shown & (degrees == tp))
        by_speed = own[np.argsort(candidates.seconds[own])]
        _, firsts = np.unique(bins[by_speed], return_index=True)
        drawn = by_speed[firsts]
        hover = [_short(layouts.row(int(index))) for index in drawn]
        traces.append(
            points(f"TP{tp}", candidates.memory_gib[drawn], candidates.seconds[drawn], series, hover=hover),
        )
    best = outcome.best
    choice = points("the choice, simulated", [best.peak_bytes / GIB], [best.step_s], shape="star")
    look = {"color": "#c026d3", "size": 14, "symbol": "star"}
    traces.append({**choice, "marker": look, "text": [_short(best.layout)]})
    return Chart(
        f"Time against memory of all {len(candidates.seconds):,} layouts that fit",
        "memory of the fullest rank, GiB",
        "step, s",
        traces,
        log_y=True,
    )


def throughput_charts(outcome: Search, candidates: Candidates) -> Iterator[Chart]:
    """Yield charts of the best throughput of the layouts that fit, by TP, PP and microbatches.

    The throughput is computed in closed form, so that all layouts of the search are included. A star marks the
    simulated choice. A chart of a single value is left out.
    """
    chosen = outcome.best.layout
    layouts = candidates.layouts
    speed = layouts.global_batch * outcome.model.sequence_length / candidates.seconds / layouts.devices
    for field, label in (("tp", "TP"), ("pp", "PP"), ("microbatches", "microbatches per step")):
        values = np.asarray(getattr(layouts, field))
        degrees = np.unique(values)
        if len(degrees) < 2:
            continue
        fastest = [int(np.flatnonzero(values == degree)[speed[values == degree].argmax()]) for degree in degrees]
        hover = [_short(layouts.row(index)) for index in fastest]
        traces = [
            line("closed form", degrees, speed[fastest], marks="circle", hover=hover),
            points(
                name="the choice, simulated",
                x=[getattr(chosen, field)],
                y=[outcome.best.tokens_per_s_per_device],
                index=3,
                shape="star",
                hover=[_short(chosen)],
            ),
        ]
        yield Chart(f"Best layout by {label}", label, "tokens/s per device", traces, log_x=True)


def collective_charts(plan: Plan, numbers: Rates) -> Iterator[Chart]:
    """Yield a chart for each gradient collective: time of one ring and of two stages over the number of nodes.

    The number of nodes goes up to the complete machine.
    """
    place = ranks_per_node(plan.layout, numbers)
    sizes = bucket_bytes(plan, numbers)
    here = float(plan.layout.dp / place.replicas_per_node)
    for operation, size in sizes.items():
        nodes, flat, staged = times_by_nodes(
            numbers,
            int(place.replicas_per_node),
            int(place.replicas_sharing),
            size,
            operation,
        )
        traces = [
            line("one ring, or RCCL's tree", nodes, 1e3 * flat, 0, marks="circle"),
            line("two stages", nodes, 1e3 * staged, 1, marks="square"),
            {
                **line(
                    "this plan",
                    [here, here],
                    [1e3 * min(flat.min(), staged.min()), 1e3 * max(flat.max(), staged.max())],
                    7,
                    dash="dot",
                )
            },
        ]
        title = f"{operation.replace('_', '-').capitalize()} of {format_bytes(size)}"
        yield Chart(
            title=title,
            x="nodes of a group",
            y="milliseconds",
            traces=traces,
            log_x=True,
            log_y=True,
        )


def scaling_points(outcome: Search, numbers: Rates, weak: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (devices, efficiency) of the chosen layout with more and fewer replicas.

    The efficiency is relative to the point with the fewest devices. Weak scaling keeps the batch per replica. Strong
    scaling keeps the global batch, so that a replica has fewer microbatches.
    """
    layout = outcome.best.layout
    total = layout.microbatches * layout.dp
    counts = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    replicas = [dp for dp in counts if dp <= 4 * layout.dp and (weak or total % dp == 0)]
    grown = as_table(
        [replace(layout, dp=dp, microbatches=layout.microbatches if weak else total // dp) for dp in replicas]
    )
    speed = grown.global_batch / step_s(outcome.model, grown, numbers) / grown.devices
    return np.asarray(grown.devices), speed / speed[0]


def scaling_charts(outcome: Search, machine: Machine, numbers: Rates) -> Iterator[Chart]:
    """Yield charts of predicted weak and strong scaling, with ORNL's published efficiencies of the same model.

    A chart is left out if it only shows an efficiency of about 1. A second prediction with the same line is left out.
    """
    ornl = rates(machine, "megatron-deepspeed") if machine.name == "frontier" else None
    for weak in (True, False):
        devices, efficiency = scaling_points(outcome, numbers, weak)
        lowest = efficiency.min()
        traces = [line("predicted, this plan", devices, efficiency, 0, marks="circle")]
        if ornl:
            other = scaling_points(outcome, ornl, weak)[1]
            lowest = min(lowest, other.min())
            if np.abs(other - efficiency).max() > SAME_EFFICIENCY:
                name = "predicted, ORNL's 2023 software"
                traces.append(line(name, devices, other, 1, marks="square", dash="dash"))
            else:
                traces[0]["name"] = "predicted, this plan and ORNL's 2023 software"
        measured = [
            point for point in PUBLISHED if point.model == outcome.model.name and (point.mode == "weak") == weak
        ]
        if not measured and lowest > 1 - SAME_EFFICIENCY:
            continue
        lowest = min([lowest, *(point.efficiency for point in measured)])
        for point in measured:
            traces.append(
                points("ORNL, measured (its own baseline)", [point.devices], [point.efficiency], 3, shape="star")
            )
        title = "Weak scaling" if weak else f"Strong scaling, global batch {outcome.global_batch}"
        yield Chart(
            title=title,
            x="devices",
            y="efficiency",
            traces=traces,
            log_x=True,
            layout={"yaxis": {"range": [0.95 * lowest, 1.02]}},
        )


COLOURS = {Kind.FORWARD: "good", Kind.BACKWARD: "bad", Kind.BACKWARD_INPUT: "terrible", Kind.BACKWARD_WEIGHT: "yellow"}


def chrome_trace(plan: Plan) -> dict[str, Any]:
    """Return Chrome trace events of the simulated part of the step. Times are in microseconds."""
    timeline = plan.simulated.timeline
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": stage, "name": "thread_name", "args": {"name": f"pipeline rank {stage}"}}
        for stage in range(timeline.schedule.stages)
    ]
    for stage in range(timeline.schedule.stages):
        for action, start_s, end_s in timeline.spans(stage):
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": stage,
                    "name": str(action),
                    "cat": action.kind.name.lower(),
                    "cname": COLOURS[action.kind],
                    "ts": start_s * 1e6,
                    "dur": (end_s - start_s) * 1e6,
                    "args": {"microbatch": action.microbatch, "position": action.position},
                }
            )
    simulated = timeline.schedule.microbatches
    m = plan.layout.microbatches
    note = "the whole step" if simulated == m else f"{simulated} of {m} microbatches; the rest repeats the pattern"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin": "simulated", "shown": note}}


def write_chrome_trace(path: Path, plan: Plan) -> None:
    """Write the trace events of a plan as JSON."""
    write_atomically(path, strict_json(chrome_trace(plan), indent=None))
