"""Loads a checkpoint: finds the saved rectangles that overlap this rank's state, copies them, and verifies digests.

A rectangle is an index range in each dim of a tensor. Exactly one rank reads and hashes each complete file. Other ranks
read only the byte ranges that they need. If the layout has not changed, each rank reads only its own file, once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frontier_llm import log
from frontier_llm.blueprint.optimizers import MASTER
from frontier_llm.checkpoint.manifest import ITEM_BYTES, DamagedCheckpoint, Manifest
from frontier_llm.checkpoint.shard import BLOCK_BYTES, Extent, layout_of, opened, read_exactly, verify
from frontier_llm.config import RunConfig, phase_at, phases_of
from frontier_llm.errors import CheckpointError, Problem, first_of
from frontier_llm.failpoints import hit
from frontier_llm.optim import Optimizer, StateRectangle, initial_loss_scale
from frontier_llm.topology.rectangles import (
    Rectangle,
    rectangles_of_run,
    spans,
)

# If the gap between two needed byte ranges is smaller than this number, both ranges are read together. On parallel file
# systems a random read of 4 KiB to 64 KiB takes about as long as a sequential read of 64 KiB. A read call in Python
# takes about 2 us.
MERGE_GAP_BYTES = 64 << 10

DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8")}


@dataclass(frozen=True)
class Transfer:
    """The overlap of a saved rectangle with a rectangle of this rank's state."""

    saved: Rectangle
    needed: StateRectangle
    overlap: Rectangle


def plan(manifest: Manifest, needed: Sequence[StateRectangle]) -> dict[int, dict[int, list[Transfer]]]:
    """Return the transfers for the rectangles `needed`, by shard and by piece of the shard.

    Raises a CheckpointError that lists every tensor that is missing in the checkpoint or has another shape there.
    Raises DamagedCheckpoint if the saved rectangles do not cover each needed rectangle exactly once.
    """
    saved_shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    index = {tensor.name: number for number, tensor in enumerate(manifest.tensors)}
    problems = [
        Problem(
            name, f"has the shape {shape} in the model and {saved_shapes.get(name, 'does not exist')} in the checkpoint"
        )
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
            f"the rectangles of {', '.join(names[:5])} overlap or leave gaps",
            where="manifest.json",
        )
    return transfers


def verifier(shard: int, shards: int, world_size: int) -> int:
    """Return the rank that reads and verifies the complete file of shard `shard`.

    If the world size has not changed, this is the rank that wrote the file. Otherwise the files are distributed evenly
    over the ranks, in order.
    """
    return shard * world_size // shards


class Targets:
    """This rank's optimizer state as the destination of loaded values. On a GPU, values go through host memory."""

    def __init__(self, needed: Sequence[StateRectangle], masters_only: bool) -> None:
        """With `masters_only`, only the masters are loaded, and the other states start from zero."""
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
        """Return True if this rank needs the values of this kind (master or optimizer state)."""
        return kind in self._host[id(transfer.needed)]

    def scatter(self, transfer: Transfer, kind: str, first: int, values: np.ndarray) -> None:
        """Copy the values of a transfer into this rank's state.

        `values` are elements [first, first + len(values)) of the saved rectangle, row-major.
        """
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
        """Copy values in host memory to the device, and set states that were not loaded to zero."""
        for part in self._needed:
            for kind, values in part.tensors.items():
                host = self._host[id(part)].get(kind)
                if host is None:
                    values.zero_()
                elif host is not values:
                    values.copy_(host)


def read_shards(
    path: Path,
    manifest: Manifest,
    optimizer: Optimizer,
    rank: int,
    world_size: int,
    on_progress: Callable[[], object] = lambda: None,
) -> list[Problem]:
    """Fill this rank's optimizer state from the shard files. Return the damage that was found.

    If there is any damage, the state must not be used. If the checkpoint is from another optimizer, only the master
    weights are loaded. Several threads call `on_progress`, after each system call that reads. Raises CheckpointError if
    the checkpoint does not fit the model.
    """
    problems: list[Problem] = []
    hit("checkpoint.loading")
    needed = optimizer.state()
    same_optimizer = manifest.optimizer == optimizer.rule.name
    # statistics (such as Adafactor's means) are loaded only if the optimizer is the same
    saved = [part for part in needed if same_optimizer or MASTER in part.tensors]
    transfers = plan(manifest, saved)
    targets = Targets(needed, masters_only=not same_optimizer)
    kinds = {tensor.name: manifest.kinds_of(tensor) for tensor in manifest.tensors}
    if same_optimizer and (other := [part.name for part in needed if kinds[part.name] != tuple(part.tensors)]):
        what = (
            f"its states of {other[0]} are {', '.join(kinds[other[0]])}; this version of {manifest.optimizer} has "
            "other states"
        )
        raise CheckpointError(what, "use the version of the optimizer that wrote the checkpoint", str(path))
    for number in range(len(manifest.shards)):
        wanted = transfers.get(number, {})
        try:
            if verifier(number, len(manifest.shards), world_size) == rank:
                _read_whole(path, manifest, number, wanted, targets, on_progress)
            elif wanted:
                _read_parts(path, manifest, number, wanted, targets, on_progress)
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
    on_progress: Callable[[], object],
) -> None:
    dtype = DTYPES[manifest.dtype]

    def consume(entry: Extent, first: int, block: memoryview) -> None:
        on_progress()
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
    on_progress: Callable[[], object],
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
                    on_progress()
                    targets.scatter(transfer, entry.kind, first, np.frombuffer(block, dtype))


def loss_scale(manifest: Manifest, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Progress from which the loss scaler of a run with `config` continues.

    A loss scale suits only the precision with which it was found. With another `precision.dtype` the run begins with
    its own initial loss scale.
    """
    progress = manifest.progress
    precision = manifest.config.get("precision")
    saved_dtype = precision.get("dtype") if isinstance(precision, Mapping) else None
    if saved_dtype in (None, config["precision"]["dtype"]):
        return {}
    done = progress.position.steps_done if progress.position is not None else ()
    phase = phase_at(phases_of(RunConfig.model_validate(config, context=done)), progress.step)
    scale = initial_loss_scale(phase.config)
    log.info(f"the loss scale begins at {scale:g}, because the checkpoint has precision.dtype={saved_dtype}")
    return {"loss_scale": scale, "scaler_clean_steps": 0}
