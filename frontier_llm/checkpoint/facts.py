"""Builds a checkpoint's manifest from facts about the job, the tensors and the written files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.manifest import (
    FORMAT,
    VERSION,
    DtypeName,
    Manifest,
    PieceRow,
    Progress,
    Shard,
    TensorEntry,
    config_digest,
)
from frontier_llm.checkpoint.shard import BLOCK_BYTES
from frontier_llm.config import TrainConfig
from frontier_llm.config.plugins import PluginRecord
from frontier_llm.data.identity import Dataset, identities


@dataclass(frozen=True)
class JobFacts:
    """Facts about the job that writes a checkpoint. Only the object of rank 0 is used."""

    config: Mapping[str, Any]  # Configuration of the run as JSON.
    environment: Mapping[str, str] = field(default_factory=dict)  # Versions, digest of the code, device.
    plugins: Sequence[PluginRecord] = ()  # Plugins that this process has imported.
    datasets: Mapping[str, Dataset] = field(default_factory=dict)  # Path → dataset, for all training data.
    layout: Mapping[str, int] = field(default_factory=dict)  # Degrees of the mesh. Set by Checkpoints.
    optimizer: str = ""  # Name of the optimizer. Set by Checkpoints.
    job: str = ""  # Job id of the scheduler, '' outside a job.
    restart: int = 0  # Number of requeues of this job.
    # Number of this start of the run, given by the supervisor. Checkpoints replaces it with the lock's number.
    incarnation: int = 0

    @property
    def data(self) -> dict[str, str]:
        """Path → identity of each dataset."""
        return identities(self.datasets)


@dataclass(frozen=True)
class Contents:
    """Tensors of a checkpoint, and the pieces (rectangles of tensors) in each file, as the manifest lists them."""

    dtype: DtypeName
    kinds: tuple[str, ...]
    tensors: tuple[TensorEntry, ...]
    pieces: list[tuple[PieceRow, ...]]  # one entry per file


def contents_of(files: Iterable[Sequence[Sequence[Any]]], dtype: DtypeName) -> Contents:
    """Return the `Contents` of all files. Each distinct tensor gets a number.

    A piece has the fields of SavedPiece. Pieces that come from other ranks are lists, because the ranks exchange JSON.
    """
    numbers: dict[str, int] = {}
    kinds_of: dict[str, tuple[str, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    pieces = []
    for held in files:
        rows = []
        for name, offset, shape, kinds, global_shape in held:
            if name not in numbers:
                numbers[name] = len(numbers)
                kinds_of[name] = tuple(kinds)
                shapes[name] = tuple(global_shape)
            rows.append((numbers[name], tuple(offset), tuple(shape)))
        pieces.append(tuple(rows))
    every_kind = tuple(dict.fromkeys(kind for kinds in kinds_of.values() for kind in kinds))
    tensors = tuple(
        TensorEntry(name=name, shape=shapes[name], kinds=() if kinds == every_kind else kinds)
        for name, kinds in kinds_of.items()
    )
    return Contents(dtype, every_kind, tensors, pieces)


def build_manifest(
    progress: Progress, facts: JobFacts, contents: Contents, files: Sequence[Mapping[str, Any] | None]
) -> Manifest:
    """Return the manifest for the files of a checkpoint.

    `files` has the name, size and digest of each rank's file, and None for a rank without data.
    """
    shards = [
        Shard(**file, pieces=pieces) for file, pieces in zip(files, contents.pieces, strict=True) if file is not None
    ]
    return Manifest(
        format=FORMAT,
        version=VERSION,
        block_bytes=BLOCK_BYTES,
        incarnation=facts.incarnation,
        progress=progress,
        layout=dict(facts.layout),
        config=dict(facts.config),
        config_sha256=config_digest(facts.config),
        environment=dict(facts.environment),
        plugins=tuple(facts.plugins),
        data=facts.data,
        dtype=contents.dtype,
        optimizer=facts.optimizer,
        kinds=contents.kinds,
        tensors=contents.tensors,
        shards=tuple(shards),
    )


def checkpoints_folder(train: TrainConfig) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(train.run_dir) / "checkpoints"
