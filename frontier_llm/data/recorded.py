"""Reads the position in the data, and the progress, from the newest complete checkpoint of a run. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from frontier_llm.config import RunConfig, Stretches, resolved
from frontier_llm.data.position import Position
from frontier_llm.errors import DataError
from frontier_llm.run.complete import BrokenManifest, manifest_bytes, step_name
from frontier_llm.run.run_dir import latest_step, rows
from frontier_llm.units import strict_json


def recorded_position(run_dir: Path) -> Position | None:
    """Return the position in the data at the newest checkpoint.

    None without a checkpoint, or if the checkpoint records no position (imported weights, formats before 4).
    """
    return position_of(_progress(run_dir))


def position_of(record: Mapping[str, Any]) -> Position | None:
    """Return the position in a record of a checkpoint or of metrics.jsonl. None if it has no valid position."""
    content = record.get("position")
    try:
        if content is None:
            return None
        return Position.model_validate_json(strict_json(content))
    except ValidationError:
        return None  # the fault is reported when the checkpoint is loaded


def tokens_read(run_dir: Path) -> dict[str, int]:
    """Return path of a dataset → number of its tokens that the run has trained on, at its newest checkpoint."""
    position = recorded_position(run_dir)
    tokens: dict[str, int] = {}
    for stream in position.streams if position else ():
        tokens[stream.path] = tokens.get(stream.path, 0) + stream.tokens_read
    return tokens


def epochs_read(run_dir: Path) -> dict[str, float]:
    """Return path → number of epochs that the run has read of that dataset, over all sequence lengths.

    Taken from the newest checkpoint. Empty for synthetic data.
    """
    position = recorded_position(run_dir)
    if position is None:
        return {}
    counted = {stream.path: position.epochs_of(dataset) for dataset, stream in position.datasets().items()}
    return {path: epochs for path, epochs in counted.items() if epochs is not None}


def before_step(run_dir: Path, step: int) -> tuple[Position, int]:
    """Return (position before a step, samples of the step) from the run's records. Steps are counted from 1.

    Raises DataError if the run has not trained the step or recorded no position for it.
    """
    trained = max((row["step"] for row in rows(run_dir) if row.get("kind") == "step"), default=0)
    if not 1 <= step <= trained:
        raise DataError(
            f"step {step} was not trained: the run has trained {trained} steps, counted from 1",
            "name a step that was trained",
            str(run_dir),
        )
    known = [row for row in rows(run_dir) if row.get("kind") == "data" and row["step"] < step]
    try:
        row = known[-1]
        position = Position.model_validate_json(strict_json(row["position"]))
        batch = int(row["global_batch"])
        return position.advance(batch, step - 1 - int(row["step"])), batch
    except (LookupError, TypeError, ValueError) as error:
        what = f"metrics.jsonl has no record of the samples that step {step} has read"
        raise DataError(
            what, "name a run that records its samples: one whose checkpoints have version 4 or newer", str(run_dir)
        ) from error


def steps_done(run_dir: Path) -> Stretches:
    """Return pairs (number of steps, tokens per step) of the steps that a run has done. () if they are not known."""
    position = recorded_position(run_dir)
    if position is not None:
        return position.steps_done
    progress = _progress(run_dir)
    step = progress.get("step")
    tokens = progress.get("tokens")
    if isinstance(step, int) and isinstance(tokens, int) and step > 0 and tokens > 0 and tokens % step == 0:
        return ((step, tokens // step),)
    return ()


def as_it_stands(config: RunConfig) -> RunConfig:
    """Return a run's configuration in which durations in tokens are converted to steps.

    Steps that the run directory records as done keep their number of tokens per step.
    """
    return resolved(config, steps_done(Path(config.train.run_dir)))


def _progress(run_dir: Path) -> Mapping[str, Any]:
    step = latest_step(run_dir)
    if not step:
        return {}
    try:
        progress = json.loads(manifest_bytes(run_dir / "checkpoints" / step_name(step)))["progress"]
    except (BrokenManifest, ValueError, TypeError, KeyError, RecursionError):
        return {}
    return progress if isinstance(progress, dict) else {}
