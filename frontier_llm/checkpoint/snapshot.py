"""The state of one step, copied aside: an exact image of this rank's shard file, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from frontier_llm.checkpoint.manifest import DtypeName, shard_name
from frontier_llm.checkpoint.pieces import KINDS, Piece, saved_pieces
from frontier_llm.checkpoint.shard import NamedPiece, header
from frontier_llm.optim import AdamW, Bucket

_NAMES: dict[torch.dtype, DtypeName] = {torch.float32: "F32", torch.float64: "F64"}


class Snapshot:
    """This rank's part of a checkpoint in host memory: 12 bytes per parameter that it saves, allocated once and used again."""

    def __init__(self, buckets: Sequence[Bucket], optimizer: AdamW, rank: int) -> None:
        self._optimizer = optimizer
        self.pieces: list[Piece] = saved_pieces(buckets)
        self.named: list[NamedPiece] = [(piece.name, piece.rectangle.offset, piece.rectangle.shape) for piece in self.pieces]
        self.file = shard_name(rank)
        self._dtype = optimizer.states[0].master.dtype
        self.dtype = _NAMES[self._dtype]
        self._image: torch.Tensor | None = None

    @property
    def data_bytes(self) -> int:
        """Without the header."""
        return sum(piece.rectangle.numel for piece in self.pieces) * len(KINDS) * self._dtype.itemsize

    def take(self) -> None:
        """Copy the state as it is now. On return it may change."""
        states = self._optimizer.states
        on_gpu = states[0].master.device.type == "cuda"
        if self._image is None:
            self._image = torch.empty(self.data_bytes // self._dtype.itemsize, dtype=self._dtype, pin_memory=on_gpu)
        position = 0
        for kind in KINDS:
            for piece in self.pieces:
                count = piece.rectangle.numel
                source = getattr(states[piece.bucket], kind)[piece.position : piece.position + count]
                self._image[position : position + count].copy_(source, non_blocking=on_gpu)
                position += count
        if on_gpu:
            torch.cuda.current_stream(states[0].master.device).synchronize()

    def data(self) -> memoryview:
        """The bytes after the header."""
        assert self._image is not None, "take() comes first"
        return self._image.numpy().view(np.uint8).data

    def header(self, step: int) -> bytes:
        """The file's header."""
        return header(self.named, self.dtype, step, self.file)
