"""Reads weights from a training checkpoint, and writes weights (for example imported ones) as a new checkpoint.

Reading and writing run in one process without a GPU. To read, the shard files are mapped into memory, and only the
requested rectangles of the fp32 masters are copied. The written checkpoint has step 0, and its Adam moments are zero.
Training can start from it with any layout. It is written one tensor at a time.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from frontier_llm.blueprint.optimizers import MASTER, STATISTIC, optimizer_rule
from frontier_llm.blueprint.parameters import model_parameters
from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint.facts import JobFacts, build_manifest, checkpoints_folder, contents_of
from frontier_llm.checkpoint.load import DTYPES
from frontier_llm.checkpoint.manifest import ITEM_BYTES, DamagedCheckpoint, DtypeName, Progress, SavedPiece, shard_name
from frontier_llm.checkpoint.shard import (
    BLOCK_BYTES,
    ShardLayout,
    layout_of,
    opened,
    read_and_hash,
    shard_layout,
    verify,
)
from frontier_llm.config import ModelConfig, RunConfig, build, phase_at, phases_of, resolved
from frontier_llm.config.plugins import records_of
from frontier_llm.errors import CheckpointError, Problem
from frontier_llm.files import created, write_all
from frontier_llm.optim import initial_loss_scale
from frontier_llm.parallel.tensor import ShardedParameter
from frontier_llm.topology.buckets import packed
from frontier_llm.topology.rectangles import Rectangle
from frontier_llm.units import format_count

DAMAGE_FIX = "restore the file from a copy, or use another checkpoint; --no-verify reads it without checks"


class WeightSource(Protocol):
    """Source of a model's weights under this project's parameter names, independent of the layout that wrote them."""

    @property
    def model(self) -> ModelConfig:
        """Model that the weights belong to."""

    def rectangle(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return part [offset, offset + shape) of a global parameter, on the CPU, in the source's dtype."""


def load_weights(source: WeightSource, parameters: Iterable[ShardedParameter]) -> None:
    """Copy each parameter's rectangle from the source."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(source.rectangle(parameter.spec.name, parameter.spec.offset, parameter.spec.shape))


class CheckpointWeights:
    """Reads tensors of a complete checkpoint, which any layout may have written. The files are memory-mapped.

    The methods of WeightSource return the master weights.
    """

    def __init__(self, path: str | Path, verified: bool = False) -> None:
        """`path` is the folder of one checkpoint. With `verified`, every shard is first compared with its digest.

        Raises DamagedCheckpoint (a CheckpointError) if a shard is missing or truncated.
        """
        self.path = Path(path)
        self.manifest = folder.read_manifest(self.path)[0]
        self.tensors = {tensor.name: tensor for tensor in self.manifest.tensors}
        self._dtype = DTYPES[self.manifest.dtype]
        # (tensor, kind) → list of (rectangle, file, first byte)
        self._places: dict[tuple[str, str], list[tuple[Rectangle, Path, int]]] = defaultdict(list)
        for shard in self.manifest.shards:
            file = self.path / shard.file
            layout = layout_of(self.manifest, shard, file)
            pieces = self.manifest.pieces_of(shard)
            with opened(file, shard.bytes, layout.head):
                for extent in layout.entries:
                    piece = pieces[extent.piece]
                    self._places[piece.name, extent.kind].append(
                        (Rectangle(piece.offset, piece.shape), file, extent.start)
                    )
        if verified and (problems := self.damage()):
            raise DamagedCheckpoint(problems)

    def damage(self, rank: int = 0, ranks: int = 1) -> list[Problem]:
        """Compare the shards that are assigned to this rank (by default all shards) with their digests. Return the
        damage.
        """
        problems: list[Problem] = []
        for shard in self.manifest.shards[rank::ranks]:
            try:
                verify(self.path / shard.file, self.manifest, shard)
            except DamagedCheckpoint as error:
                problems += (replace(problem, fix=problem.fix or DAMAGE_FIX) for problem in error.problems)
        return problems

    @functools.cached_property
    def config(self) -> RunConfig:
        """Configuration of the run in the phase of the last step before this checkpoint.

        Raises ConfigError if this version cannot read the configuration, and CheckpointError if the configuration and
        the tensors describe different models.
        """
        run = build(RunConfig, self.manifest.config, where=f"{self.path}/manifest.json: config")
        progress = self.manifest.progress
        if progress.position is not None:
            run = resolved(run, progress.position.steps_done)
        config = phase_at(phases_of(run), max(0, progress.step - 1)).config
        self._refuse_other_model(config.model)
        return config

    def _refuse_other_model(self, model: ModelConfig) -> None:
        """Raise CheckpointError if the shapes in the configuration differ from the tensors' shapes.

        The check runs before a model is built or memory is allocated.
        """
        where = f"{self.path}/manifest.json: config"
        fix = "the checkpoint was damaged or forged: use another one"
        if model.layers > len(self.tensors):
            raise CheckpointError(
                f"has {model.layers:,} layers, more than the {len(self.tensors):,} tensors of the checkpoint",
                fix,
                where,
            )
        claimed = model_parameters(model)
        held = {name: tensor.shape for name, tensor in self.tensors.items()}
        other = [name for name, parameter in claimed.items() if held.get(name) != parameter.shape]
        unknown = [
            name
            for name, tensor in self.tensors.items()
            if name not in claimed and MASTER in self.manifest.kinds_of(tensor)
        ]
        if not other and not unknown:
            return
        total = sum(parameter.numel for parameter in claimed.values())
        present = sum(prod(held[name]) for name in [*claimed, *unknown] if name in held)
        if other:
            name = other[0]
            is_held = f"is {held[name]}" if name in held else "is missing"
            difference = f"{name} should have the shape {claimed[name].shape}, but {is_held}"
        else:
            difference = f"{unknown[0]} is not part of this model"
        what = (
            f"is a model of {format_count(total)} parameters, but the tensors have {format_count(present)}: "
            f"{difference}"
        )
        raise CheckpointError(what, fix, where)

    @property
    def model(self) -> ModelConfig:
        """Model that was trained."""
        return self.config.model

    def read(self, name: str, kind: str, wanted: Rectangle | None = None) -> np.ndarray:
        """Return a rectangle of one tensor, by default the complete tensor, in fp32 (fp64 for an fp64 run).

        Raises CheckpointError if parts of the rectangle are in no shard.
        """
        shape = self.tensors[name].shape
        wanted = wanted or Rectangle((0,) * len(shape), shape)
        result = np.empty(wanted.shape, self._dtype)
        missing = wanted.numel
        for rectangle, file, start in self._places[name, kind]:
            common = rectangle.intersect(wanted)
            if common is not None:
                stored = np.memmap(file, self._dtype, "r", start, rectangle.shape)
                result[common.within(wanted)] = stored[common.within(rectangle)]
                missing -= common.numel
        if missing:
            raise CheckpointError(
                f"{missing} elements of {name} are in no shard", where=str(self.path), fix="use another checkpoint"
            )
        return result

    def rectangle(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return part [offset, offset + shape) of a master on the CPU, in fp32 (fp64 for an fp64 run)."""
        if name not in self.tensors:
            raise CheckpointError(
                f"has no tensor {name}", where=str(self.path), fix="use a checkpoint of the same model"
            )
        return torch.from_numpy(self.read(name, MASTER, Rectangle(tuple(offset), tuple(shape))))


def write_checkpoint(source: WeightSource, config: RunConfig, shard_bytes: int) -> Path:
    """Write `config.train.run_dir`/checkpoints/step_00000000 from a source of weights.

    Only one tensor at a time is in memory. Raises CheckpointError if the run already has a checkpoint.
    """
    directory = checkpoints_folder(config.train)
    steps = folder.named_steps(directory)
    if steps:
        what = f"already contains {folder.step_name(steps[0])}"
        raise CheckpointError(what, where=str(directory), fix="import into a new train.run_dir")
    dtype: DtypeName = "F64" if config.precision.dtype == "fp64" else "F32"
    rule = optimizer_rule(config.optimizer.name)
    parameters = model_parameters(config.model)
    tensors = [(parameter, rule.kinds(parameter)) for parameter in parameters.values()]
    tensors += [(one, (STATISTIC,)) for parameter in parameters.values() for one in rule.statistics(parameter)]
    everything = [SavedPiece(one.name, (0,) * len(one.shape), one.shape, kinds, one.shape) for one, kinds in tensors]

    def state_bytes(piece: SavedPiece) -> int:
        return prod(piece.shape) * len(piece.kinds) * ITEM_BYTES[dtype]

    def master_of(piece: SavedPiece) -> Tensor:
        parameter = parameters[piece.name]
        if parameter.of_training:  # other formats do not have it
            return torch.full(piece.shape, parameter.init_value)
        return source.rectangle(piece.name, piece.offset, piece.shape)

    held = list(packed(everything, state_bytes, shard_bytes))
    facts = JobFacts(
        config=config.model_dump(mode="json"),
        plugins=records_of(config.plugins),
        layout={"tp": 1, "cp": 1, "pp": 1, "dp": 1, "zero": 0},
        optimizer=rule.name,
    )
    progress = Progress(
        step=0,
        consumed_samples=0,
        tokens=0,
        optimizer_updates=0,
        loss_scale=initial_loss_scale(config),
        scaler_clean_steps=0,
        skipped_steps=0,
    )
    try:
        with folder.writing(directory, sum(map(state_bytes, everything))):
            directory.mkdir(parents=True, exist_ok=True)
            building = folder.begin(directory, step=0, incarnation=0)
            files = []
            for number, pieces in enumerate(held):
                name = shard_name(number)
                layout = shard_layout(pieces, dtype, 0, name)
                digest = _write_shard(building / name, master_of, pieces, layout, DTYPES[dtype])
                files.append({"file": name, "bytes": layout.total_bytes, "sha256": digest})
            manifest = build_manifest(progress, facts, contents_of(held, dtype), files)
            return folder.commit(directory, manifest, manifest.to_bytes(), manifest.incarnation)
    except BaseException:
        shutil.rmtree(folder.temporary(directory, 0, 0), ignore_errors=True)
        raise


_OF_TRAINING = ("balance", "balance_weight", "z_weight", "bias_rate")  # fields of MoeConfig without effect on outputs
_OF_POSITION = {"rope": {"rope_theta", "rope_fraction", "rope_scaling"}, "alibi": {"alibi_max_bias"}}


def compare_models(run: ModelConfig, imported: ModelConfig) -> list[Problem]:
    """Return a Problem for every field in which the run's model computes another function than the imported model."""
    free = {"name", "vocab_multiple", "init_std", "dropout"}
    if run.position != "learned":
        free.add("sequence_length")  # training may continue with another sequence length
    for position, fields in _OF_POSITION.items():  # fields of unused position encodings have no effect
        free |= fields if imported.position != position else set()
    ours = _resolved(run)
    theirs = _resolved(imported)
    if run.moe is not None and imported.moe is not None:
        theirs["moe"] = {**theirs["moe"], **{field: getattr(run.moe, field) for field in _OF_TRAINING}}

    def written(value: object) -> str:  # returns `value` in the syntax of a run file
        return value if isinstance(value, str) else json.dumps(value)

    return [
        Problem(
            f"model.{field}",
            f"is {written(ours[field])}, but the weights are of a model with {written(theirs[field])}",
            f"set model.{field}={written(theirs[field])}",
        )
        for field in ours
        if field not in free and ours[field] != theirs[field]
    ]


def _resolved(model: ModelConfig) -> dict[str, Any]:
    return {
        **model.model_dump(),
        "moe": None if model.moe is None else {**model.moe.model_dump(), "expert_hidden": model.expert_hidden},
        "kv_heads": model.num_kv_heads,
        "head_dim": model.dim_per_head,
        "qkv_bias": model.has_qkv_bias,
    }


def _write_shard(
    path: Path,
    master_of: Callable[[SavedPiece], Tensor],
    pieces: Sequence[SavedPiece],
    layout: ShardLayout,
    dtype: np.dtype[Any],
) -> str:
    """Write a shard and return its digest.

    The optimizer states are zero: they are holes of a sparse file.
    """
    with created(path) as descriptor:
        os.ftruncate(descriptor, layout.total_bytes)
        write_all(descriptor, memoryview(layout.head), 0)
        for entry in layout.entries:
            if entry.kind == MASTER:
                values = master_of(pieces[entry.piece]).to(torch.from_numpy(np.empty(0, dtype)).dtype)
                write_all(descriptor, values.reshape(-1).view(torch.uint8).numpy().data, entry.start)
    with opened(path, layout.total_bytes, layout.head) as descriptor:
        return read_and_hash(descriptor, path, layout, BLOCK_BYTES)
