"""Reading: which saved rectangles overlap what this rank needs, and the copying, verified against the digests on the
way.

Every file is read whole and hashed by exactly one rank, which takes what it needs in passing; the others read only the
byte ranges they need. With the layout that wrote the checkpoint, each rank reads its own file once and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frontier_llm.blueprint.optimizers import MASTER
from frontier_llm.checkpoint.manifest import ITEM_BYTES, DamagedCheckpoint, Manifest
from frontier_llm.checkpoint.shard import BLOCK_BYTES, Extent, layout_of, opened, read_exactly, verify
from frontier_llm.errors import CheckpointError, Problem, first_of
from frontier_llm.failpoints import hit
from frontier_llm.optim import Optimizer, StateRectangle
from frontier_llm.topology.rectangles import (
    Rectangle,
    rectangles_of_run,
    spans,
)

# Two needed ranges closer than this are read as one. A random 4 KiB-64 KiB read costs about as much as 64 KiB in
# sequence on the
# parallel file systems that this is for, and a Python-level read call about 2 us.
MERGE_GAP_BYTES = 64 << 10

DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8")}


@dataclass(frozen=True)
class Transfer:
    """The common part of a saved rectangle and a needed one."""

    saved: Rectangle
    needed: StateRectangle
    overlap: Rectangle


def plan(manifest: Manifest, needed: Sequence[StateRectangle]) -> dict[int, dict[int, list[Transfer]]]:
    """shard → piece → transfers. Raises CheckpointError listing every tensor that the checkpoint lacks, has in
    another shape or in part.
    """
    saved_shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    index = {tensor.name: number for number, tensor in enumerate(manifest.tensors)}
    problems = [
        Problem(name, f"the model has {shape}, the checkpoint {saved_shapes.get(name, 'nothing of that name')}")
        for name, shape in dict.fromkeys((piece.name, piece.global_shape) for piece in needed)
        if saved_shapes.get(name) != shape
    ]
    if problems:
        raise CheckpointError(first_of(problems))
    wanted = defaultdict(list)
    for piece in needed:
        wanted[index[piece.name]].append(piece)
    transfers: dict[int, dict[int, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
    missing = {id(piece): piece.rectangle.numel for piece in needed}
    for shard_number, shard in enumerate(manifest.shards):
        for piece_number, (tensor, offset, shape) in enumerate(shard.pieces):
            for piece in wanted.get(tensor, ()):
                saved = Rectangle(offset, shape)
                overlap = saved.intersect(piece.rectangle)
                if overlap is not None:
                    transfers[shard_number][piece_number].append(Transfer(saved, piece, overlap))
                    missing[id(piece)] -= overlap.numel
    if any(missing.values()):
        names = sorted({piece.name for piece in needed if missing[id(piece)]})
        raise DamagedCheckpoint(
            f"the rectangles of {', '.join(names[:5])} overlap or leave holes",
            where="manifest.json",
        )
    return transfers


def verifier(shard: int, shards: int, world_size: int) -> int:
    """The rank that reads a file whole: its writer when the world has the same size, else spread evenly in order."""
    return shard * world_size // shards


class Targets:
    """Where loaded values go: this rank's optimizer state, through host memory when it lies on a GPU."""

    def __init__(self, needed: Sequence[StateRectangle], masters_only: bool) -> None:
        """With `masters_only` the other states are to start anew, from zero."""
        self._needed = needed
        self._host = {
            id(part): {
                kind: self._host_tensor(values)
                for kind, values in part.tensors.items()
                if kind == MASTER or not masters_only
            }
            for part in needed
        }

    @staticmethod
    def _host_tensor(state: Tensor) -> Tensor:
        if state.device.type == "cpu":
            return state
        return torch.empty(state.shape, dtype=state.dtype)

    def takes(self, transfer: Transfer, kind: str) -> bool:
        """The values of this kind are wanted."""
        return kind in self._host[id(transfer.needed)]

    def scatter(self, transfer: Transfer, kind: str, first: int, values: np.ndarray) -> None:
        """Copy what `transfer` wants of elements [first, first + len(values)) of its saved rectangle."""
        if not self.takes(transfer, kind):
            return
        target = self._host[id(transfer.needed)][kind].numpy()
        position = 0
        for local in rectangles_of_run(transfer.saved.shape, first, first + len(values)):
            source = local.shifted(transfer.saved.offset)
            common = source.intersect(transfer.overlap)
            if common is not None:
                block = values[position : position + local.numel].reshape(local.shape)
                target[common.within(transfer.needed.rectangle)] = block[common.within(source)]
            position += local.numel

    def finish(self) -> None:
        """Move what was gathered on the host to the device."""
        for part in self._needed:
            for kind, values in part.tensors.items():
                host = self._host[id(part)].get(kind)
                if host is None:
                    values.zero_()
                elif host is not values:
                    values.copy_(host)


def read_shards(path: Path, manifest: Manifest, optimizer: Optimizer, rank: int, world_size: int) -> list[Problem]:
    """Fill this rank's optimizer state from the files; returns what is damaged (the state is then not to be used).

    Of a checkpoint of another optimizer only the masters are taken. Raises CheckpointError when the checkpoint does not
    fit the model.
    """
    problems: list[Problem] = []
    hit("checkpoint.loading")
    needed = optimizer.state()
    same_optimizer = manifest.optimizer == optimizer.rule.name
    saved = [part for part in needed if same_optimizer or MASTER in part.tensors]  # statistics are the optimizer's own
    transfers = plan(manifest, saved)
    targets = Targets(needed, masters_only=not same_optimizer)
    kinds = {tensor.name: manifest.kinds_of(tensor) for tensor in manifest.tensors}
    if same_optimizer and (other := [part.name for part in needed if kinds[part.name] != tuple(part.tensors)]):
        what = f"{manifest.optimizer} keeps other states of {other[0]} than {', '.join(kinds[other[0]])}"
        raise CheckpointError(what, "take the version of the optimizer that wrote it", str(path))
    for number in range(len(manifest.shards)):
        wanted = transfers.get(number, {})
        try:
            if verifier(number, len(manifest.shards), world_size) == rank:
                _read_whole(path, manifest, number, wanted, targets)
            elif wanted:
                _read_parts(path, manifest, number, wanted, targets)
        except DamagedCheckpoint as error:
            problems.extend(error.problems)
    if not problems:
        targets.finish()
    return problems


def _read_whole(
    path: Path,
    manifest: Manifest,
    number: int,
    wanted: dict[int, list[Transfer]],
    targets: Targets,
) -> None:
    dtype = DTYPES[manifest.dtype]

    def consume(entry: Extent, first: int, block: memoryview) -> None:
        for transfer in wanted.get(entry.piece, ()):
            targets.scatter(transfer, entry.kind, first, np.frombuffer(block, dtype))

    shard = manifest.shards[number]
    verify(path / shard.file, manifest, shard, consume)


def _read_parts(
    path: Path,
    manifest: Manifest,
    number: int,
    wanted: dict[int, list[Transfer]],
    targets: Targets,
) -> None:
    shard = manifest.shards[number]
    dtype = DTYPES[manifest.dtype]
    item = ITEM_BYTES[manifest.dtype]
    file = path / shard.file
    layout = layout_of(manifest, shard, file)
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with opened(file, shard.bytes, layout.head) as descriptor:
        for entry in layout.entries:
            for transfer in wanted.get(entry.piece, ()):
                if not targets.takes(transfer, entry.kind):
                    continue
                for first, stop in spans(
                    transfer.saved,
                    transfer.overlap,
                    MERGE_GAP_BYTES // item,
                    BLOCK_BYTES // item,
                ):
                    block = buffer[: (stop - first) * item]
                    read_exactly(descriptor, file, entry.start + first * item, block)
                    targets.scatter(transfer, entry.kind, first, np.frombuffer(block, dtype))
