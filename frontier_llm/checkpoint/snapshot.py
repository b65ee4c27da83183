"""The state of one step, copied aside: an exact image of this rank's shard file, so that training may go on while it is written."""

from __future__ import annotations

import numpy as np
import torch

from frontier_llm.checkpoint.manifest import DtypeName, shard_name
from frontier_llm.checkpoint.shard import NamedPiece, header
from frontier_llm.optim import KINDS, Optimizer, StateRectangle

_NAMES: dict[torch.dtype, DtypeName] = {torch.float32: "F32", torch.float64: "F64"}


class Snapshot:
    """This rank's part of a checkpoint in host memory: 12 bytes per parameter that it saves, allocated once and used again."""

    def __init__(self, optimizer: Optimizer, rank: int) -> None:
        state = optimizer.state()
        self.pieces: list[StateRectangle] = [part for part in state if part.saved]
        self.named: list[NamedPiece] = [(piece.name, piece.rectangle.offset, piece.rectangle.shape) for piece in self.pieces]
        self.file = shard_name(rank)
        self._dtype = state[0].tensors["master"].dtype
        self.dtype = _NAMES[self._dtype]
        self._image: torch.Tensor | None = None

    @property
    def data_bytes(self) -> int:
        """Without the header."""
        return sum(piece.rectangle.numel for piece in self.pieces) * len(KINDS) * self._dtype.itemsize

    def take(self) -> None:
        """Copy the state as it is now. On return it may change."""
        devices = {piece.tensors["master"].device for piece in self.pieces}
        on_gpu = any(device.type == "cuda" for device in devices)
        if self._image is None:
            self._image = torch.empty(self.data_bytes // self._dtype.itemsize, dtype=self._dtype, pin_memory=on_gpu)
        position = 0
        for kind in KINDS:
            for piece in self.pieces:
                count = piece.rectangle.numel
                self._image[position : position + count].copy_(piece.tensors[kind].view(-1), non_blocking=on_gpu)
                position += count
        if on_gpu:
            for device in devices:
                torch.cuda.current_stream(device).synchronize()

    def data(self) -> memoryview:
        """The bytes after the header."""
        assert self._image is not None, "take() comes first"
        return self._image.numpy().view(np.uint8).data

    def header(self, step: int) -> bytes:
        """The file's header."""
        return header(self.named, self.dtype, step, self.file)
