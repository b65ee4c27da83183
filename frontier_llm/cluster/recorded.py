"""What the newest complete checkpoint of a run says of its position in the data. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from frontier_llm.cluster.complete import BrokenManifest, manifest_bytes, step_name
from frontier_llm.cluster.run_dir import latest_step
from frontier_llm.config import RunConfig, Stretches, resolved
from frontier_llm.data.position import Position


def recorded_position(run_dir: Path) -> Position | None:
    """None without a checkpoint, and of one that records no position (imported weights, formats before 4)."""
    content = _progress(run_dir).get("position")
    try:
        return None if content is None else Position.model_validate_json(json.dumps(content))
    except ValidationError:
        return None  # the load names what is wrong


def steps_done(run_dir: Path) -> Stretches:
    """The steps that a run has done, with their sizes; () if that is not known."""
    position = recorded_position(run_dir)
    if position is not None:
        return position.steps_done
    progress = _progress(run_dir)
    step, tokens = progress.get("step"), progress.get("tokens")
    if isinstance(step, int) and isinstance(tokens, int) and step > 0 and tokens > 0 and tokens % step == 0:
        return ((step, tokens // step),)
    return ()


def as_it_stands(config: RunConfig) -> RunConfig:
    """A run's configuration with its durations in tokens counted from what the run in its directory has done."""
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
