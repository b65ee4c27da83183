"""Prediction beside measurement: what the planner says about the layouts of runs that have taken place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from frontier_llm.blueprint.layout import layout_of
from frontier_llm.cluster import run_dir
from frontier_llm.config import load_run
from frontier_llm.errors import DataError
from frontier_llm.machine import Rates
from frontier_llm.planner.report import layout_words
from frontier_llm.planner.search import simulate_layout
from frontier_llm.units import format_seconds

FILES = ("config.yaml", "plan.json", "metrics.jsonl")
MISSING = "train it first, or name the run directory (train.run_dir) of a run that has taken steps"


@dataclass(frozen=True)
class MeasuredRun:
    """A run directory's layout, its median step, and the simulated one."""

    directory: Path
    layout: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction; negative is too fast."""
        return self.predicted_s / self.measured_s - 1


def read_run(directory: Path, numbers: Rates) -> MeasuredRun:
    """A run directory beside its prediction. Raises DataError where the run has left no step times."""
    if missing := [name for name in FILES if not (directory / name).is_file()]:
        raise DataError(f"is not the directory of a run that trained: it lacks {', '.join(missing)}", where=str(directory), fix=MISSING)
    try:
        config = load_run(str(directory / "config.yaml"))
        grid = json.loads((directory / "plan.json").read_text(encoding="utf-8"))["grid"]
    except (ValueError, KeyError) as error:
        raise DataError(f"cannot be read as a run directory: {error}", where=str(directory), fix=MISSING) from error
    since = max((row["step"] for row in run_dir.layouts(directory)), default=0)  # the configuration is that of the last layout
    rows = (row for row in run_dir.rows(directory) if row.get("kind") == "step" and row["step"] > since)
    times = [float(row["step_time_s"]) for row in rows]
    if not times:
        raise DataError("holds no step times", where=str(directory), fix=MISSING)
    w = layout_of(config, grid["tp"] * grid["pp"] * grid["dp"])
    plan = simulate_layout(config.model, w, numbers, config.parallel.stage_layers)
    return MeasuredRun(directory, layout_words(plan), median(times[1:] or times), plan.step_s)


def as_table(runs: Sequence[MeasuredRun]) -> str:
    """One line per run."""
    lines = [f"{'run':28} {'predicted':>10} {'measured':>10} {'error':>8}  layout"]
    for one in runs:
        lines.append(
            f"{one.directory.name:28} {format_seconds(one.predicted_s):>10} {format_seconds(one.measured_s):>10} "
            f"{100 * one.error:>+6.1f} %  {one.layout}"
        )
    return "\n".join(lines)
