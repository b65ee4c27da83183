"""Table of trials (trials.csv), from which a search continues in the next job."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from frontier_llm.blueprint.layout import Layout
from frontier_llm.errors import DataError
from frontier_llm.experiments.tuning.space import CHOICES
from frontier_llm.files import write_atomically

TRIALS_FILE = "trials.csv"
RETRIED = ("node failure", "interrupted")  # statuses that give no result for the layout


@dataclass(frozen=True)
class Trial:
    """Measured result of one layout on the machine."""

    number: int
    layout: Layout
    why: str  # planner | spread | model | exhaustive
    predicted_s: float  # seconds of a step, predicted by the planner
    status: str  # a status of `scaling.launch.judge`, or interrupted
    step_s: float | None  # median of the measured steps
    steps: int  # measured steps
    wall_s: float  # seconds from the start of the ranks to their end
    node_hours: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True if a step time was measured."""
        return self.step_s is not None


_TAIL = tuple(field.name for field in fields(Trial) if field.name not in ("number", "layout"))
_OF_LAYOUT = [*CHOICES, "microbatches"]
COLUMNS = ["number", *_OF_LAYOUT, *_TAIL]


def as_csv(trials: Sequence[Trial]) -> str:
    """Return the table as CSV with one header line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for trial in trials:
        layout = [getattr(trial.layout, name) for name in _OF_LAYOUT]
        tail = [_cell(getattr(trial, name)) for name in _TAIL]
        writer.writerow([trial.number, *layout, *tail])
    return text.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return " ".join(value.split())
    return value


def write_trials(path: Path, trials: Sequence[Trial]) -> None:
    """Write the complete table atomically."""
    write_atomically(path, as_csv(trials))


def read_trials(path: Path, like: Layout) -> list[Trial]:
    """Return the trials of a table, or an empty list if the file does not exist.

    If the table lacks a field of a layout, the field has the value in `like`. Raises DataError if a line is damaged.
    """
    if not path.is_file():
        return []
    trials = []
    for line, row in enumerate(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))), 2):
        try:
            trials.append(_trial(row, like))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"line {line} is not a trial: {error!r}", "remove the line, or choose another --output", str(path)
            ) from None
    return trials


def _trial(row: dict[str, str], like: Layout) -> Trial:
    values = {name: _read(row[name], getattr(like, name)) for name in _OF_LAYOUT if name in row}
    return Trial(
        number=int(row["number"]),
        layout=replace(like, **values),
        why=row["why"],
        predicted_s=float(row["predicted_s"]),
        status=row["status"],
        step_s=float(row["step_s"]) if row["step_s"] else None,
        steps=int(row["steps"]),
        wall_s=float(row["wall_s"]),
        node_hours=float(row["node_hours"]),
        detail=row["detail"],
    )


def _read(text: str, like: Any) -> Any:
    """Convert the text to the type of `like`."""
    if isinstance(like, bool):
        return {"True": True, "False": False}[text]
    return int(text) if isinstance(like, int) else text
