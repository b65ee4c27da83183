"""A training checkpoint as a source of weights, and a source of weights as a training checkpoint: one process, no GPU, no layout.

Reading maps the shard files into memory and copies the rectangles that are asked for; only the fp32 masters are touched. Writing
makes a step-0 checkpoint, tensor by tensor, from which training starts on any layout; its Adam moments are zero.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint.digest import BLOCK_BYTES, RunningDigest
from frontier_llm.checkpoint.load import DTYPES
from frontier_llm.checkpoint.manifest import ITEM_BYTES, DtypeName, Progress, TensorEntry, shard_name
from frontier_llm.checkpoint.save import build_manifest
from frontier_llm.checkpoint.shard import check_header, entries, header, header_of, opened, verify, write_all
from frontier_llm.checkpoint.source import WeightSource
from frontier_llm.config import ModelConfig, RunConfig, build
from frontier_llm.errors import CheckpointError, Problem
from frontier_llm.optim import KINDS, initial_loss_scale
from frontier_llm.packing import packed
from frontier_llm.topology import Rectangle


class _Saved(NamedTuple):
    """A rectangle in a file."""

    rectangle: Rectangle
    file: str
    start: int  # byte of its first element


class CheckpointWeights:
    """The masters of a complete checkpoint, whatever layout wrote it (see WeightSource)."""

    def __init__(self, path: str | Path, verified: bool = False) -> None:
        """`path` is a step's folder. With `verified`, every shard is first read whole and compared with its digest.

        Raises CheckpointError (DamagedCheckpoint) for a missing or truncated shard, naming it.
        """
        self.path = Path(path)
        self.manifest = folder.read_manifest(self.path)[0]
        self.config = build(RunConfig, self.manifest.config, where=f"{self.path}/manifest.json: config")
        self._dtype = DTYPES[self.manifest.dtype]
        self._shapes = {tensor.name: tensor.shape for tensor in self.manifest.tensors}
        self._saved: dict[str, list[_Saved]] = defaultdict(list)
        for shard in self.manifest.shards:
            file = self.path / shard.file
            expected = header_of(self.manifest, shard, file)
            if verified:
                verify(file, self.manifest, shard)
            with opened(file, shard.bytes) as descriptor:
                check_header(descriptor, file, expected)
            for entry in entries(shard, self.manifest.dtype, len(expected)):
                if entry.kind == "master":
                    tensor, offset, shape = shard.pieces[entry.piece]
                    name = self.manifest.tensors[tensor].name
                    self._saved[name].append(_Saved(Rectangle(offset, shape), shard.file, entry.start))

    @property
    def model(self) -> ModelConfig:
        """The shape that was trained."""
        return self.config.model

    def rectangle(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """See WeightSource; fp32 (fp64 for an fp64 run)."""
        if name not in self._shapes:
            raise CheckpointError(f"holds no tensor {name}", where=str(self.path), fix="it belongs to a model of another shape")
        wanted = Rectangle(tuple(offset), tuple(shape))
        result = np.empty(wanted.shape, self._dtype)
        missing = wanted.numel
        for saved in self._saved[name]:
            common = saved.rectangle.intersect(wanted)
            if common is None:
                continue
            held = np.memmap(self.path / saved.file, self._dtype, "r", saved.start, saved.rectangle.shape)
            result[common.within(wanted)] = held[common.within(saved.rectangle)]
            missing -= common.numel
        if missing:
            raise CheckpointError(f"{missing} elements of {name} are in no shard", where=str(self.path), fix="take another checkpoint")
        return torch.from_numpy(result)


def write_checkpoint(source: WeightSource, shapes: Sequence[tuple[str, tuple[int, ...]]], config: RunConfig, shard_bytes: int) -> Path:
    """Write `config.train.run_dir`/checkpoints/step_00000000 from a source; `shapes` are the model's parameters by name.

    One tensor at a time is in memory. Raises CheckpointError when the run has a checkpoint already.
    """
    directory = Path(config.train.run_dir) / "checkpoints"
    steps = folder.complete_steps(directory)
    if steps:
        what = f"holds {folder.step_name(steps[0])} already"
        raise CheckpointError(what, where=str(directory), fix="import into a new train.run_dir")
    dtype: DtypeName = "F64" if config.precision.dtype == "fp64" else "F32"
    building = folder.temporary(directory, 0, 0)
    if building.exists():
        folder.delete_tree(building)
    building.mkdir(parents=True)
    tensors = tuple(TensorEntry(name=name, shape=shape) for name, shape in shapes)
    rows, parts = [], []
    state_bytes = [prod(shape) * ITEM_BYTES[dtype] * len(KINDS) for _, shape in shapes]
    for number, indices in enumerate(packed(range(len(shapes)), state_bytes.__getitem__, shard_bytes)):
        file = shard_name(number)
        digest, size = _write_shard(building / file, source, [shapes[index] for index in indices], dtype)
        rows.append([(index, (0,) * len(shapes[index][1]), shapes[index][1]) for index in indices])
        parts.append({"file": file, "bytes": size, "sha256": digest})
    scale = initial_loss_scale(config)
    progress = Progress(step=0, consumed_samples=0, tokens=0, optimizer_updates=0, loss_scale=scale, scaler_clean_steps=0, skipped_steps=0)
    manifest = build_manifest(
        progress,
        incarnation=0,
        layout={"tp": 1, "pp": 1, "dp": 1, "zero": 0},
        config=config.model_dump(mode="json"),
        environment={},
        dtype=dtype,
        tensors=tensors,
        rows=rows,
        parts=parts,
    )
    return folder.commit(directory, manifest)


def compare_models(run: ModelConfig, imported: ModelConfig) -> list[Problem]:
    """Every field in which a run's model is not the function that the imported weights belong to."""
    free = {"name", "vocab_multiple", "init_std"}
    if run.position != "learned":
        free.add("sequence_length")  # training may go on with another context
    ours, theirs = _resolved(run), _resolved(imported)

    def written(value: object) -> str:  # as a run file has it
        return value if isinstance(value, str) else json.dumps(value)

    return [
        Problem(
            f"model.{field}",
            f"is {written(ours[field])}, the weights are of a model with {written(theirs[field])}",
            f"set model.{field}={written(theirs[field])}",
        )
        for field in ours
        if field not in free and ours[field] != theirs[field]
    ]


def _resolved(model: ModelConfig) -> dict[str, object]:
    content = {**model.model_dump(), "kv_heads": model.num_kv_heads, "head_dim": model.dim_per_head, "qkv_bias": model.has_qkv_bias}
    if model.position != "rope":
        content |= {"rope_theta": None, "rope_fraction": None, "rope_scaling": None}
    if model.position != "alibi":
        content["alibi_max_bias"] = None
    return content


def _write_shard(path: Path, source: WeightSource, tensors: Sequence[tuple[str, tuple[int, ...]]], dtype: DtypeName) -> tuple[str, int]:
    """(digest, bytes) of a shard whose moments are zero."""
    head = header([(name, (0,) * len(shape), shape) for name, shape in tensors], dtype, 0, path.name)
    digest, size = RunningDigest(head), len(head)
    zeros = memoryview(bytes(BLOCK_BYTES))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def put(data: memoryview) -> None:
        nonlocal size
        digest.update(data)
        write_all(descriptor, data, size)
        size += len(data)

    try:
        write_all(descriptor, memoryview(head), 0)
        for name, shape in tensors:
            values = source.rectangle(name, (0,) * len(shape), shape).to(torch.float64 if dtype == "F64" else torch.float32)
            put(values.reshape(-1).view(torch.uint8).numpy().data)
        left = sum(prod(shape) for _, shape in tensors) * ITEM_BYTES[dtype] * (len(KINDS) - 1)
        while left:
            put(zeros[: min(left, BLOCK_BYTES)])
            left -= min(left, BLOCK_BYTES)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest(), size
