"""A timeline for people: as text for terminals and docs, as PNG for reports."""

from __future__ import annotations

from itertools import islice
from math import ceil
from pathlib import Path
from typing import IO

from frontier_llm.errors import BackendError
from frontier_llm.schedule.actions import Action, Kind, Placement
from frontier_llm.schedule.simulate import Timeline
from frontier_llm.units import plural

COLORS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f58518",
    Kind.BACKWARD_INPUT: "#f58518",
    Kind.BACKWARD_WEIGHT: "#54a24b",
}


def render_text(timeline: Timeline, columns: int = 160) -> str:
    """One line per stage, time to the right, idle time as dots; the shortest action gets just enough columns for its name.

    A timeline that needs more than `columns` is cut there, marked with '…'. The last line gives makespan and bubble.
    """
    schedule = timeline.schedule
    spans = [span for stage in range(schedule.stages) for span in islice(timeline.spans(stage), columns)]
    column_s = min((end_s - start_s) / (len(schedule.label(action)) + 1) for action, start_s, end_s in spans if end_s > start_s)
    label = len(f"stage {schedule.stages - 1}")
    lines = []
    for stage in range(schedule.stages):
        line = ""
        for action, start_s, end_s in timeline.spans(stage):
            begin, end = round(start_s / column_s), round(end_s / column_s)
            line = line.ljust(begin, "·") + schedule.label(action)[: end - begin].ljust(end - begin)
            if len(line) > columns:
                break
        line = line.ljust(ceil(timeline.makespan_s / column_s), "·")
        lines.append(f"{f'stage {stage}':<{label}} |" + (line if len(line) <= columns else line[: columns - 1] + "…"))
    chunks = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    size = f"{schedule.name}, {schedule.stages} stages{chunks}, {plural(schedule.microbatches, 'microbatch')}"
    return "\n".join([*lines, f"{size}: makespan {timeline.makespan_s:.4g}, bubble {timeline.bubble_fraction:.1%} of compute"])


def _color(action: Action, placement: Placement) -> tuple[float, float, float]:
    """The kind's colour, lighter for a rank's later virtual stages."""
    lighter = 0.5 * (action.position * placement.chunks // len(placement.rank_of)) / placement.chunks
    red, green, blue = (int(COLORS[action.kind][index : index + 2], 16) / 255 for index in (1, 3, 5))
    return (red + (1 - red) * lighter, green + (1 - green) * lighter, blue + (1 - blue) * lighter)


def render_figure(timeline: Timeline, path: Path | IO[str], file_format: str = "png") -> None:
    """Write the timeline as a figure ("png", or "svg" into a text stream); bars carry the microbatch number where there is room.

    Raises BackendError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError("drawing needs matplotlib", "pip install matplotlib") from error
    schedule = timeline.schedule
    figure = Figure(
        figsize=(min(24.0, 4 + 0.02 * schedule.stages * schedule.microbatches + 8), 1.2 + 0.45 * schedule.stages),
        dpi=110,
        layout="constrained",
    )
    axes = figure.subplots()
    for stage in range(schedule.stages):
        spans = list(timeline.spans(stage))
        axes.broken_barh(
            [(start_s, end_s - start_s) for _, start_s, end_s in spans],
            (stage - 0.45, 0.9),
            facecolors=[_color(action, schedule.placement) for action, _, _ in spans],
            edgecolors="white",
            linewidth=0.4,
        )
        if len(spans) <= 80:
            for action, start_s, end_s in spans:
                axes.text((start_s + end_s) / 2, stage, str(action.microbatch), ha="center", va="center", fontsize=7, color="white")
    axes.set(xlim=(0, timeline.makespan_s), ylim=(schedule.stages - 0.5, -0.5), xlabel="time", ylabel="stage")
    axes.set_yticks(range(schedule.stages))
    chunks = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    axes.set_title(
        f"{schedule.name}{chunks}, {plural(schedule.microbatches, 'microbatch')}: bubble {timeline.bubble_fraction:.1%} of compute"
    )
    for kind in COLORS:
        if any(action.kind is kind for action in schedule.actions[0]):
            axes.bar(0, 0, color=COLORS[kind], label=kind.name.lower().replace("_", " "))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, format=file_format)
