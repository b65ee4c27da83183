"""Comparison of the planner's predicted step time with the measured step time of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from frontier_llm.errors import DataError
from frontier_llm.experiments.measure.run_record import read_run
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.report import layout_words
from frontier_llm.planner.search import simulate_layout
from frontier_llm.tables import aligned
from frontier_llm.topology.expert_nodes import run_layout
from frontier_llm.units import format_seconds

MISSING = "train it first, or name the run directory (train.run_dir) of a run that has taken steps"


@dataclass(frozen=True)
class MeasuredRun:
    """Layout of a run with its measured median step time and its predicted step time."""

    directory: Path
    machine: str
    layout: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error of the predicted step time. If it is negative, the prediction is too short."""
        return self.predicted_s / self.measured_s - 1


def beside_prediction(
    directory: Path,
    machine: str = "",
    stack: str | None = None,
    plugins: Sequence[str] = (),
) -> MeasuredRun:
    """Return the measured and predicted step time of a run directory.

    The prediction is for `machine`, or for the machine that the run's file names. `plugins` is passed to `read_run`.
    Raises DataError if the directory holds no run or no step times.
    """
    record = read_run(directory, plugins)
    last = record.parts[-1]  # the last span of steps with one layout, which record.config describes
    times = [
        float(row["step_time_s"]) for row in record.steps if row["step"] > last.after_step and "step_time_s" in row
    ]
    if not times:
        raise DataError("has no step times", where=str(directory), fix=MISSING)
    machine = machine or record.config.machine
    numbers = rates(load_machine(machine), stack)
    layout = run_layout(record.config, last.plan.grid.world_size, numbers)
    plan = simulate_layout(record.config.model, layout, numbers, record.config.parallel.stage_layers)
    return MeasuredRun(directory, machine, layout_words(plan), median(times[1:] or times), plan.step_s)


def as_table(runs: Sequence[MeasuredRun]) -> str:
    """Return a table with one line per run."""
    rows = (
        (
            run.directory.name,
            run.machine,
            format_seconds(run.predicted_s),
            format_seconds(run.measured_s),
            f"{100 * run.error:+.1f} %",
            run.layout,
        )
        for run in runs
    )
    return aligned(("run", "machine", ">predicted", ">measured", ">error", "layout"), rows)
