"""How long before the walltime the ranks are told to save: measured if the run has saved before, else estimated."""

from __future__ import annotations

import statistics
from pathlib import Path

from frontier_llm.cluster.sites import Site
from frontier_llm.run import run_dir

MIN_WARNING_S = 120
GRAIN_S = 30


def warning_s(step_s: float, save_s: float) -> int:
    """Twice (a step + a save) + 60 s, in whole half minutes, at least two minutes.

    A rank notices at the end of a step; a late step and a slow filesystem are allowed as much again; Slurm's clock has
    a grain of a minute.
    """
    return max(MIN_WARNING_S, -(-int(2 * (step_s + save_s) + 60) // GRAIN_S) * GRAIN_S)


def next_warning_s(directory: Path, site: Site, expected_step_s: float = 0.0) -> int:
    """The warning time of the next job of a run: from its own steps and saves, else the site's plus twice the expected
    step.
    """
    if (measured := measured_warning_s(directory)) is not None:
        return measured
    return site.signal_lead_s + -(-int(2 * expected_step_s) // GRAIN_S) * GRAIN_S


def measured_warning_s(directory: Path) -> int | None:
    """What the median step and the slowest save recorded in a run directory ask for; None before the first save."""
    saves = save_seconds(directory)
    steps = [float(row["step_time_s"]) for row in run_dir.steps(directory) if "step_time_s" in row]
    return warning_s(statistics.median(steps), max(saves)) if saves and steps else None


def save_seconds(directory: Path) -> list[float]:
    """How long each recorded save took until it was durable: from the line of its step to the line of the save."""
    seconds: list[float] = []
    finished: dict[int, float] = {}
    for row in run_dir.read_jsonl(directory / "metrics.jsonl"):
        if row.get("kind") == "step" and "time" in row:
            finished[row["step"]] = float(row["time"])
        elif row.get("kind") == "save" and row.get("step") in finished:
            seconds.append(float(row["time"]) - finished[row["step"]])
    return seconds
