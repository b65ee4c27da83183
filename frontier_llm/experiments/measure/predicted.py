"""Prediction beside measurement: what the planner says about the layouts of runs that have taken place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from frontier_llm.errors import DataError
from frontier_llm.experiments.measure.run_record import read_run
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.report import layout_words
from frontier_llm.planner.search import simulate_layout
from frontier_llm.tables import aligned
from frontier_llm.topology.expert_nodes import run_layout
from frontier_llm.units import format_seconds

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


def beside_prediction(directory: Path, numbers: Rates, plugins: Sequence[str] = ()) -> MeasuredRun:
    """A run directory beside its prediction; `plugins` as `read_run`. Raises DataError where there is no run, or it
    has left no step times.
    """
    record = read_run(directory, plugins)
    last = record.parts[-1]  # the configuration is that of the last layout
    times = [
        float(row["step_time_s"]) for row in record.steps if row["step"] > last.after_step and "step_time_s" in row
    ]
    if not times:
        raise DataError("holds no step times", where=str(directory), fix=MISSING)
    layout = run_layout(record.config, last.plan.grid.world_size, numbers)
    plan = simulate_layout(record.config.model, layout, numbers, record.config.parallel.stage_layers)
    return MeasuredRun(directory, layout_words(plan), median(times[1:] or times), plan.step_s)


def as_table(runs: Sequence[MeasuredRun]) -> str:
    """One line per run."""
    rows = (
        (
            run.directory.name,
            format_seconds(run.predicted_s),
            format_seconds(run.measured_s),
            f"{100 * run.error:+.1f} %",
            run.layout,
        )
        for run in runs
    )
    return aligned(("run", ">predicted", ">measured", ">error", "layout"), rows)
