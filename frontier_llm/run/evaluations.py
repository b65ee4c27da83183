"""Results of `evaluate RUN --follow`: one file `step_NNNNNNNN.json` per checkpoint in a folder of the run directory."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frontier_llm.run.complete import fault, named_step, named_steps, step_name
from frontier_llm.run.records import DamagedRecord, is_number, read_json

FOLDER = "evaluations"


@dataclass(frozen=True)
class Evaluated:
    """Result of one checkpoint."""

    step: int
    losses: dict[str, float]  # key: name of the dataset
    accuracies: dict[str, float]  # key: name of the task


def result_path(results: Path, step: int) -> Path:
    """Return the file with the result of a checkpoint."""
    return results / f"{step_name(step)}.json"


def next_step(directory: Path, results: Path, failed: Collection[int] = ()) -> int | None:
    """Return the step of the newest complete checkpoint without a result. None if there is none."""
    checkpoints = directory / "checkpoints"
    for step in named_steps(checkpoints):
        if step in failed or result_path(results, step).exists():
            continue
        if fault(checkpoints / step_name(step)) is None:
            return step
    return None


def newest_result(run_dir: Path) -> Evaluated | None:
    """Return the result of the newest evaluated checkpoint. None if there is none. Raises DamagedRecord."""
    steps = _evaluated_steps(run_dir)
    return _read(run_dir, steps[-1]) if steps else None


def all_results(run_dir: Path) -> list[Evaluated]:
    """Return the results of all evaluated checkpoints, in ascending order of steps. Raises DamagedRecord."""
    results = [_read(run_dir, step) for step in _evaluated_steps(run_dir)]
    return [result for result in results if result is not None]


def _evaluated_steps(run_dir: Path) -> list[int]:
    """Return the steps of the files in the folder of results, in ascending order."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        steps = [named_step(entry.name.removesuffix(".json")) for entry in entries if entry.name.endswith(".json")]
    return sorted(step for step in steps if step is not None)


def _read(run_dir: Path, step: int) -> Evaluated | None:
    """Return the result of one checkpoint. None if the file has been deleted."""
    path = result_path(run_dir / FOLDER, step)
    content: dict[str, Any] | None = read_json(path, dict, "delete it; the checkpoint is then evaluated again")
    if content is None:
        return None
    losses = dict(_numbers(content.get("held_out"), "dataset", "loss", path))
    accuracies = dict(_numbers(content.get("tasks"), "task", "acc", path))
    return Evaluated(step=step, losses=losses, accuracies=accuracies)


def _numbers(rows: Any, name: str, value: str, path: Path) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of each row. Rows whose value is null are left out."""
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, dict) or not isinstance(row.get(name), str):
            raise DamagedRecord("is not the result of an evaluation", "delete it", str(path))
        number = row.get(value)
        if number is not None and is_number(number):
            yield row[name], float(number)
