"""Copies this rank's state to host memory in the layout of the rank's shard file.

Training can continue while the copy is written to the file.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

from frontier_llm.blueprint.optimizers import MASTER
from frontier_llm.checkpoint.manifest import DtypeName, SavedPiece, shard_name
from frontier_llm.checkpoint.shard import ShardLayout, shard_layout
from frontier_llm.optim import Optimizer

_NAMES: dict[torch.dtype, DtypeName] = {torch.float32: "F32", torch.float64: "F64"}


def pinned(elements: int, *, dtype: torch.dtype) -> torch.Tensor:
    """Return page-locked host memory of exactly this size, to which a GPU copies directly.

    torch's allocator of such memory rounds up to the next power of two, for example from 13.9 GiB to 16 GiB.
    """
    image = torch.empty(elements, dtype=dtype)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call, unused-ignore]
    if int(runtime.cudaHostRegister(image.data_ptr(), image.nbytes, 0)):
        return torch.empty(elements, dtype=dtype, pin_memory=True)
    weakref.finalize(image, runtime.cudaHostUnregister, image.data_ptr())
    return image


class Snapshot:
    """Copy in host memory of the state that this rank saves. The memory is allocated once and used for every save."""

    def __init__(self, optimizer: Optimizer, rank: int) -> None:
        state = optimizer.state()
        self.saved = [part for part in state if part.saved]
        places = ((part, part.rectangle) for part in self.saved)
        self.pieces = [
            SavedPiece(part.name, place.offset, place.shape, tuple(part.tensors), part.global_shape)
            for part, place in places
        ]
        self.file = shard_name(rank)
        self._dtype = next(iter(state[0].tensors.values())).dtype
        self.dtype = _NAMES[self._dtype]
        self._image: torch.Tensor | None = None

    def layout(self, step: int) -> ShardLayout:
        """Return the layout of this rank's file."""
        return shard_layout(self.pieces, self.dtype, step, self.file)

    def take(self) -> None:
        """Copy the current state. After this method has returned, training may change the state."""
        layout = self.layout(step=0)
        item = self._dtype.itemsize
        devices = {values.device for part in self.saved for values in part.tensors.values()}
        on_gpu = any(device.type == "cuda" for device in devices)
        if self._image is None:
            self._image = (pinned if on_gpu else torch.empty)(layout.data_bytes // item, dtype=self._dtype)
        for entry in layout.entries:
            first = (entry.start - len(layout.head)) // item
            values = self.saved[entry.piece].tensors[entry.kind].view(-1)
            self._image[first : first + entry.numel].copy_(values, non_blocking=on_gpu)
        if on_gpu:
            for device in devices:
                torch.cuda.current_stream(device).synchronize()

    def not_finite(self) -> list[str]:
        """Return the names of copied parameters with NaN or infinite weights."""
        assert self._image is not None, "take() comes first"
        layout = self.layout(step=0)
        image = self._image.numpy()
        names = []
        for extent in layout.entries:
            first = (extent.start - len(layout.head)) // image.itemsize
            values = image[first : first + extent.numel]
            # min and max propagate NaN
            if extent.kind == MASTER and not np.isfinite([values.min(), values.max()]).all():
                names.append(self.saved[extent.piece].name)
        return names

    def data(self) -> memoryview:
        """Return the data bytes of the shard file, which follow the header."""
        assert self._image is not None, "take() comes first"
        return self._image.numpy().view(np.uint8).data
