"""Figures of a search: PNG files and one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from frontier_llm.costs.layouts import as_table
from frontier_llm.costs.memory import peak_memory
from frontier_llm.costs.time import seats, step_s
from frontier_llm.machine import Machine, Rates, rates
from frontier_llm.planner import report
from frontier_llm.planner.algorithms import bucket_bytes, gradient_choices, times_by_nodes
from frontier_llm.planner.candidates import enumerate_layouts
from frontier_llm.planner.search import Plan, Search
from frontier_llm.schedule import Kind
from frontier_llm.units import GIB, format_bytes

COLOURS = {Kind.FORWARD: "#4c78a8", Kind.BACKWARD: "#f58518", Kind.BACKWARD_INPUT: "#e45756", Kind.BACKWARD_WEIGHT: "#eeca3b"}
SHOWN_ACTIONS = 6000  # a timeline beyond this is a solid block

# ORNL's published points (arXiv:2312.12705, abstract): GCDs at the largest run, weak and strong efficiency there
ORNL = {"gpt-175b": (1024, 1.0, 0.89), "gpt-1t": (3072, 1.0, 0.87)}


def write_figures(directory: Path, outcome: Search, machine: Machine, stack: str, numbers: Rates) -> list[Path]:
    """pipeline.png, memory.png, throughput.png, scaling.png, where gradients cross nodes collectives.png, and index.html."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    directory.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, Callable[[Any], None]] = {
        "pipeline": lambda figure: draw_pipeline(figure, outcome.best),
        "memory": lambda figure: draw_memory(figure, outcome.best),
        "throughput": lambda figure: draw_throughput(figure, outcome, numbers),
        "scaling": lambda figure: draw_scaling(figure, outcome, machine, numbers),
    }
    if gradient_choices(outcome.best, numbers):
        drawings["collectives"] = lambda figure: draw_collectives(figure, outcome.best, numbers)
    paths = []
    for name, draw in drawings.items():
        figure = plt.figure(figsize=(12, 4.5), layout="constrained")
        draw(figure)
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        paths.append(path)
    page = directory / "index.html"
    page.write_text(_html(outcome, machine, stack, numbers, paths), encoding="utf-8")
    return [*paths, page]


def _html(outcome: Search, machine: Machine, stack: str, numbers: Rates, paths: list[Path]) -> str:
    pictures = "\n".join(map(_picture, paths))
    words = html.escape(
        report.text(outcome, machine, stack, numbers, None) + "\n\n" + report.explain(outcome.best, machine, stack, numbers)
    )
    title = html.escape(f"{outcome.model.name} on {outcome.nodes} nodes of {machine.name}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><style>pre {{ overflow-x: auto }}</style><title>{title}</title>'
        f'<body style="font-family:sans-serif;max-width:1200px;margin:auto;padding:0 1rem"><h1>{title}</h1>'
        f"<p>Simulated, but for the points that a legend calls measured.</p>{pictures}"
        f"<h2>report</h2><pre>{words}</pre></body></html>\n"
    )


def _picture(path: Path) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<h2>{path.stem}</h2><img style="max-width:100%" alt="{path.stem}" src="data:image/png;base64,{content}">'


def plain_log2(axes: Any, values: np.ndarray) -> None:
    """A logarithmic axis that is labelled with the powers of two themselves, some eight of them."""
    axes.set_xscale("log", base=2)
    powers = range(int(np.ceil(np.log2(np.min(values)))), int(np.log2(np.max(values))) + 1)
    axes.set_xticks([2**power for power in powers][:: max(1, len(powers) // 8 + 1)])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()


def draw_pipeline(figure: Any, plan: Plan) -> None:
    """The played part of the schedule, one row per pipeline rank; beyond `SHOWN_ACTIONS` only its beginning."""
    axes = figure.subplots()
    timeline = plan.played.timeline
    stages = timeline.schedule.stages
    limit = SHOWN_ACTIONS // stages
    for stage in range(stages):
        spans = list(timeline.spans(stage))[:limit]
        for kind, colour in COLOURS.items():
            bars = [(start, end - start) for action, start, end in spans if action.kind is kind]
            axes.broken_barh(
                bars,
                (stage - 0.45, 0.9),
                facecolors=colour,
                edgecolor="white",
                linewidth=0.2,
                label=kind.name.lower() if stage == 0 and bars else None,
            )
    axes.invert_yaxis()
    axes.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set(xlabel=_time_axis(plan), ylabel="pipeline rank", title=report.layout_words(plan))
    figure.legend(loc="outside lower center", ncols=len(COLOURS), fontsize=8, frameon=False)


def _time_axis(plan: Plan) -> str:
    """The unit, and how much of the step is drawn."""
    played, whole = plan.played.timeline.schedule.microbatches, plan.layout.microbatches
    part = f", {played} of the {whole} microbatches: the pattern of the middle repeats" if played < whole else ""
    return f"seconds (simulated{part})"


def draw_memory(figure: Any, plan: Plan) -> None:
    """Stacked memory lines per pipeline rank against the device's limit."""
    axes = figure.subplots()
    ranks = np.arange(len(plan.memory))
    bottom = np.zeros(len(ranks))
    for name in plan.memory[0]:
        size = np.array([lines[name] for lines in plan.memory]) / GIB
        if size.any():
            axes.bar(ranks, size, bottom=bottom, label=name, width=0.9)
            bottom += size
    axes.axhline(plan.limit_bytes / GIB, color="black", linestyle="--", label="device")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set(xlabel="pipeline rank", ylabel="GiB", ylim=(0, 1.08 * plan.limit_bytes / GIB), title="memory per pipeline rank")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)


def draw_throughput(figure: Any, outcome: Search, numbers: Rates) -> None:
    """Best throughput of the layouts that fit, against TP, PP and microbatches; closed form, so that every layout is there."""
    layouts = enumerate_layouts(
        outcome.model, outcome.nodes * numbers.node_devices, outcome.global_batch, 8 * numbers.node_devices, outcome.fixed
    )
    layouts = layouts.where(peak_memory(outcome.model, layouts, numbers) <= numbers.memory_bytes)
    speed = layouts.global_batch * outcome.model.sequence_length / step_s(outcome.model, layouts, numbers) / layouts.devices
    for axes, (field, label) in zip(
        figure.subplots(1, 3, sharey=True), (("tp", "TP"), ("pp", "PP"), ("microbatches", "microbatches per step")), strict=True
    ):
        values = np.asarray(getattr(layouts, field))
        axis = np.unique(values)
        axes.plot(axis, [speed[values == value].max() for value in axis], "o-")
        plain_log2(axes, axis)
        axes.set(xlabel=label, title=f"best over all else, by {label}")
        if field == "tp":
            axes.axvline(numbers.node_devices, color="grey", linestyle=":")
            axes.set_ylabel("tokens/s per device")


def draw_collectives(figure: Any, plan: Plan, numbers: Rates) -> None:
    """Each collective of a gradient bucket against the nodes of its group, up to the whole machine: one ring and two stages."""
    place, sizes = seats(plan.layout, numbers), bucket_bytes(plan, numbers)
    for axes, (operation, size) in zip(np.atleast_1d(figure.subplots(1, len(sizes), sharey=True)), sizes.items(), strict=True):
        nodes, flat, staged = times_by_nodes(numbers, int(place.replicas_per_node), int(place.replicas_sharing), size, operation)
        axes.plot(nodes, 1e3 * flat, "o-", label="one ring, or RCCL's tree")
        axes.plot(nodes, 1e3 * staged, "s-", label="two stages")
        axes.axvline(float(plan.layout.dp / place.replicas_per_node), color="grey", linestyle=":", label="this plan")
        plain_log2(axes, nodes)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(
            xlabel="nodes of a group",
            ylabel="milliseconds" if axes.get_subplotspec().is_first_col() else "",
            title=f"{operation.replace('_', '-')} of {format_bytes(size)}",
        )
        axes.legend(fontsize=8)


def scaling_points(outcome: Search, numbers: Rates, weak: bool) -> tuple[np.ndarray, np.ndarray]:
    """(devices, efficiency) of the chosen layout with more and fewer replicas; weak keeps the batch per replica, strong the whole.

    Relative to the fewest devices shown. Strong scaling keeps the global batch, so the microbatches per replica shrink.
    """
    layout = outcome.best.layout
    total = layout.microbatches * layout.dp
    counts = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    replicas = [dp for dp in counts if dp <= 4 * layout.dp and (weak or total % dp == 0)]
    grown = as_table([replace(layout, dp=dp, microbatches=layout.microbatches if weak else total // dp) for dp in replicas])
    speed = grown.global_batch / step_s(outcome.model, grown, numbers) / grown.devices
    return grown.devices, speed / speed[0]


def draw_scaling(figure: Any, outcome: Search, machine: Machine, numbers: Rates) -> None:
    """Predicted weak and strong scaling, with ORNL's published efficiencies where the model is theirs."""
    ornl = rates(machine, "megatron-deepspeed") if machine.name == "frontier" else None
    for axes, weak in zip(figure.subplots(1, 2, sharey=True), (True, False), strict=True):
        axes.plot(*scaling_points(outcome, numbers, weak), "o-", label="predicted, this plan")
        if ornl:
            axes.plot(*scaling_points(outcome, ornl, weak), "s--", label="predicted, ORNL's 2023 software")
        point = ORNL.get(outcome.model.name)
        if point:
            axes.plot([point[0]], [point[1 if weak else 2]], "k*", markersize=14, label="ORNL, measured (its own baseline)")
        plain_log2(axes, scaling_points(outcome, numbers, weak)[0])
        axes.set(
            xlabel="devices",
            ylabel="efficiency" if weak else "",
            title="weak scaling" if weak else f"strong scaling, global batch {outcome.global_batch}",
            ylim=(0, 1.1),
        )
        axes.legend(fontsize=8)
