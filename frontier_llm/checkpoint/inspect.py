"""Lists, verifies and compares checkpoints outside of a run.

The functions run in one process, hold one tensor in memory at a time, and change no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import shard as shard_file
from frontier_llm.checkpoint.drift import (
    Change,
    allowed_changes,
    comparing,
    config_changes,
    data_changes,
    environment_changes,
    plugin_changes,
)
from frontier_llm.checkpoint.facts import JobFacts
from frontier_llm.checkpoint.manifest import DamagedCheckpoint
from frontier_llm.checkpoint.weights import CheckpointWeights
from frontier_llm.config import RunConfig
from frontier_llm.config.plugins import records_of
from frontier_llm.data.identity import datasets_of
from frontier_llm.errors import CheckpointError, Problem
from frontier_llm.run.complete import fault


def find(path: Path) -> list[Path]:
    """Return the checkpoints at `path` (`directory.checkpoints_at`), oldest first.

    Raises CheckpointError if there is none.
    """
    checkpoints = [one for one in folder.checkpoints_at(path) if one.exists()]
    if not checkpoints:
        raise CheckpointError(
            "contains no complete checkpoint",
            "give a run directory, its checkpoints folder or a step_… folder",
            str(path.absolute()),
        )
    return checkpoints[::-1]


def check_resume(directory: Path, config: RunConfig, allowed: Collection[str]) -> None:
    """Raise CheckpointError if a run with `config` could not continue from the checkpoints in `directory`.

    The run itself would raise the same error. This check runs before any rank starts.
    """
    for step in folder.named_steps(directory):
        path = directory / folder.step_name(step)
        if fault(path) is not None:
            continue  # the run will report this damage and load an older checkpoint
        try:
            saved = folder.read_manifest(path)[0]
        except DamagedCheckpoint:
            continue
        facts = JobFacts(
            config=config.model_dump(mode="json"),
            plugins=records_of(config.plugins),
            datasets=datasets_of([config]),
        )
        allowed_changes(saved, facts, allowed, str(path))
        return


def verify(path: Path, progress: Callable[[int, int], None] = lambda done, of: None) -> list[Problem]:
    """Return a list of all damage of a checkpoint, empty if the checkpoint is intact.

    The function checks each digest and size, and finds files that are missing, not in the manifest, or links.
    `progress` receives the number of shards that have been read and their total number.

    Raises DeletedCheckpoint if its run deletes the checkpoint while it is read.
    """
    with folder.unless_deleted(path):
        problems = _damage(path, progress)
        if problems:
            path.stat()  # raises FileNotFoundError if the checkpoint has been deleted
    return problems


def _damage(path: Path, progress: Callable[[int, int], None]) -> list[Problem]:
    try:
        manifest = folder.read_manifest(path)[0]
    except DamagedCheckpoint as error:
        return list(error.problems)
    problems = [
        Problem(str(path / name), "is not part of the checkpoint") for name in folder.unexpected_files(path, manifest)
    ]
    for number, entry in enumerate(manifest.shards, start=1):
        try:
            shard_file.verify(path / entry.file, manifest, entry)
        except DamagedCheckpoint as error:
            problems.extend(error.problems)
        progress(number, len(manifest.shards))
    return problems


@dataclass(frozen=True)
class TensorDifference:
    """Difference between two checkpoints in one tensor: in its master weights, or in one optimizer state."""

    name: str
    kind: str
    differing: int
    elements: int
    largest: float  # largest absolute difference


@dataclass(frozen=True)
class Difference:
    """Result of the comparison of two checkpoints."""

    changes: list[Change]  # changes of configuration, data, plugins, environment and progress
    only_first: list[str]
    only_second: list[str]
    reshaped: list[str]
    tensors: list[TensorDifference]

    @property
    def same_state(self) -> bool:
        """True if weights and optimizer state are bit-equal, even if different layouts wrote them."""
        return not (self.only_first or self.only_second or self.reshaped or self.tensors)


def compare(first: Path, second: Path) -> Difference:
    """Compare two checkpoints element by element, and return their differences. Their layouts may differ.

    Raises DamagedCheckpoint.
    """
    left = CheckpointWeights(first)
    right = CheckpointWeights(second)
    a = left.manifest
    b = right.manifest
    progress_after = vars(b.progress)
    progress = [
        Change(f"progress.{key}", value, progress_after[key], False)
        for key, value in vars(a.progress).items()
        if progress_after[key] != value
    ]
    # Compare elements only if a tensor has the same shape and the same kinds of state in both checkpoints.
    before = _forms(left)
    after = _forms(right)
    common = [name for name in before if name in after]
    with comparing(str(first / folder.MANIFEST), str(second / folder.MANIFEST)):
        changes = config_changes(a.config, b.config)
    reshaped = []
    for name in common:
        for form, other in zip(before[name], after[name], strict=True):
            if form != other:
                reshaped.append(f"{name} {form} → {other}")
    return Difference(
        changes=[
            *progress,
            *changes,
            *data_changes(a.data, b.data),
            *plugin_changes(a.known_plugins, b.known_plugins),
            *environment_changes(a.environment, b.environment),
        ],
        only_first=[name for name in before if name not in after],
        only_second=[name for name in after if name not in before],
        reshaped=reshaped,
        tensors=list(_compare_tensors(left, right, [name for name in common if before[name] == after[name]])),
    )


def _forms(weights: CheckpointWeights) -> dict[str, tuple[Any, ...]]:
    """Return name of a tensor → (shape, kinds of state)."""
    return {name: (tensor.shape, weights.manifest.kinds_of(tensor)) for name, tensor in weights.tensors.items()}


def _compare_tensors(a: CheckpointWeights, b: CheckpointWeights, names: list[str]) -> Iterator[TensorDifference]:
    for name in names:
        for kind in a.manifest.kinds_of(a.tensors[name]):
            left = a.read(name, kind)
            right = b.read(name, kind)
            differing = left.size
            if left.dtype == right.dtype:  # compare bits, so that NaN equals NaN, and 0.0 differs from -0.0
                bits = f"u{left.itemsize}"
                differing = int((left.view(bits) != right.view(bits)).sum())
            if differing:
                with np.errstate(invalid="ignore"):
                    gaps = np.abs(left - right)
                    largest = float(np.nanmax(gaps)) if np.isfinite(gaps).any() else math.nan
                yield TensorDifference(name, kind, differing, left.size, largest)


def summary(path: Path) -> dict[str, Any]:
    """Return the values in a line of `checkpoint list`. Raises DamagedCheckpoint or DeletedCheckpoint."""
    with folder.unless_deleted(path):
        manifest = folder.read_manifest(path)[0]
        written_unix_s = (path / folder.MANIFEST).stat().st_mtime
    return {
        "path": str(path),
        **manifest.summary(),
        "written_unix_s": written_unix_s,
        "latest": folder.read_latest(path.parent) == path.name,
        "best": folder.read_latest(path.parent, folder.BEST) == path.name,
    }
