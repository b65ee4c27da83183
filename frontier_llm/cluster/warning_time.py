"""Computes the warning time: the seconds before the walltime at which Slurm signals the ranks to save.

The warning time is computed from the measured times of earlier steps and saves, or else from an estimate.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from frontier_llm.cluster.sites import Site
from frontier_llm.run import run_dir

MIN_WARNING_S = 120
GRAIN_S = 30


def warning_s(step_s: float, save_s: float) -> int:
    """Return twice (a step + a save) + 60 s, rounded up to half minutes, and at least two minutes.

    A rank notices the signal at the end of a step. The factor 2 allows for a slow step and a slow file system. Slurm's
    clock has a resolution of one minute.
    """
    return max(MIN_WARNING_S, -(-int(2 * (step_s + save_s) + 60) // GRAIN_S) * GRAIN_S)


def next_warning_s(directory: Path, site: Site, expected_step_s: float = 0.0) -> int:
    """Return the warning time of the next job of a run, measured from its own steps and saves.

    Without measurements, return the site's time plus twice the expected step.
    """
    if (measured := measured_warning_s(directory)) is not None:
        return measured
    return site.warning_time_s + -(-int(2 * expected_step_s) // GRAIN_S) * GRAIN_S


def measured_warning_s(directory: Path) -> int | None:
    """Return the warning time from the median step and the slowest save of a run. None before the first save."""
    saves = save_seconds(directory)
    steps = [float(row["step_time_s"]) for row in run_dir.steps(directory) if "step_time_s" in row]
    return warning_s(statistics.median(steps), max(saves)) if saves and steps else None


def save_seconds(directory: Path) -> list[float]:
    """Return the duration of each recorded save, from the line of its step to the line of the durable save."""
    seconds: list[float] = []
    finished: dict[int, float] = {}
    for row in run_dir.read_jsonl(directory / "metrics.jsonl"):
        if row.get("kind") == "step" and "time" in row:
            finished[row["step"]] = float(row["time"])
        elif row.get("kind") == "save" and row.get("step") in finished:
            seconds.append(float(row["time"]) - finished[row["step"]])
    return seconds
