"""Converts numpy microbatches of frontier_llm.data to tensors on this rank's device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from frontier_llm.comm import Mesh, all_reduce_
from frontier_llm.data.loader import SampleBatch
from frontier_llm.model import Microbatch
from frontier_llm.topology.grid import held_positions


class BatchSource(Protocol):
    """Source of a rank's microbatches: `data.loader.Batches`, or a replacement in a test."""

    microbatches: int  # number of microbatches per step and data-parallel rank
    reset_at_documents: bool
    # True if a loss mask excludes some targets: at document boundaries, or in a prompt, which is only read
    masks_targets: bool

    def microbatch(self, step: int, index: int) -> SampleBatch:
        """Return microbatch `index` of step `step` for this data-parallel rank."""

    def sample_ids(self, step: int, index: int) -> range:
        """Return the sample numbers of this microbatch in the run's data."""


class Feed:
    """Reads the microbatches of one rank and copies them to the rank's device.

    A rank that holds neither embedding nor head reads no data, unless attention is limited to documents.
    """

    def __init__(
        self,
        source: BatchSource,
        targets_per_step: int,
        mesh: Mesh,
        device: torch.device,
        is_end: bool = True,
        *,
        sequences_per_step: int = 0,
        drops: bool = False,
    ) -> None:
        """`targets_per_step` is global batch × sequence length, the number of targets if none is masked.

        `is_end`: this rank has the embedding or the head. `drops`: the model uses dropout in training.
        """
        self._sequences_per_step = sequences_per_step
        self._source = source
        self._targets_per_step = targets_per_step
        self._mesh = mesh
        self._device = device
        self._reads = is_end or source.reset_at_documents
        self._drops = drops
        # Function that is called with the index of a microbatch before the microbatch is read, and with None after it.
        self.on_read: Callable[[int | None], object] = lambda index: None

    def step(self, step: int) -> Callable[[int], Microbatch]:
        """Return a function that maps the index of a microbatch to the microbatch of training step `step`.

        If the source masks any target, the call is collective over the replicas.
        """
        targets = self.count_targets(step)

        def microbatch(index: int) -> Microbatch:
            batch = self.microbatch(step, index, targets)
            if not self._drops:
                return batch
            ids = self._source.sample_ids(step, index)
            return replace(batch, samples_B=self._tensor(np.array(ids, np.int64)))

        return microbatch

    def microbatch(self, step: int, index: int, global_targets: int | Tensor) -> Microbatch:
        """Return a microbatch with the sequence as its first dim, without sample numbers for dropout."""
        if not self._reads:
            return Microbatch(global_targets=global_targets, global_sequences=self._sequences_per_step)
        self.on_read(index)
        samples = self._source.microbatch(step, index)
        tokens_S1B = samples.tokens_BS1.T
        batch = Microbatch(
            tokens_SB=self.held(tokens_S1B[:-1]),
            targets_SB=self.held(tokens_S1B[1:]),
            documents_BS=None if samples.documents_BS is None else self._tensor(samples.documents_BS),
            loss_mask_SB=None if samples.loss_mask_BS is None else self.held(samples.loss_mask_BS.T),
            global_targets=global_targets,
            global_sequences=self._sequences_per_step,
        )
        self.on_read(None)
        return batch

    def count_targets(self, step: int) -> int | Tensor:
        """Return the number of targets in the step's global batch that the loss mask does not exclude.

        If the source masks any target, the call is collective over the replicas. The number is then a tensor on the
        device, so that the host need not wait for the sum over dp and cp.
        """
        if not self._source.masks_targets:
            return self._targets_per_step
        mine = sum(self._count(self._source.microbatch(step, index)) for index in range(self._source.microbatches))
        return all_reduce_(self._tensor(np.array([mine], np.int64)), self._mesh.replicas)[0]

    def _count(self, samples: SampleBatch) -> int:
        """Return the number of this rank's targets that the loss mask does not exclude."""
        mask_BS = samples.loss_mask_BS
        if mask_BS is None:
            return samples.target_count // self._mesh.cp.size
        return int(self._held(mask_BS.T).sum())

    def held(self, rows: np.ndarray) -> Tensor:
        """Return the part of `rows` for this rank's tokens under context parallelism, on the device.

        `rows` has one row for each position of the sequence.
        """
        return self._tensor(self._held(rows))

    def _held(self, rows: np.ndarray) -> np.ndarray:
        cp = self._mesh.cp
        if cp.size == 1:
            return rows
        return np.concatenate([rows[part.start : part.stop] for part in held_positions(len(rows), cp.size, cp.rank)])

    def _tensor(self, array: np.ndarray) -> Tensor:
        """Copy an array to the device.

        The array is first copied to pinned memory. With pageable memory the host would wait for the copy to the GPU.
        """
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
