"""From the data room's numpy microbatches to the model's tensors on this rank's device."""

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
    """Where a rank's microbatches come from: data.loader.Batches, or a test's own."""

    microbatches: int  # per step and replica
    reset_at_documents: bool
    masks_targets: bool  # by documents, or as tokens that are read and not learnt

    def microbatch(self, step: int, index: int) -> SampleBatch:
        """Microbatch `index` of step `step` of this data-parallel rank."""

    def sample_ids(self, step: int, index: int) -> range:
        """The numbers of its samples in the run's data."""


class Feed:
    """One rank's batches on its device. Stages between the ends of the pipeline read nothing, unless documents cut
    attention.
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
        """`targets_per_step`: global batch x sequence, the count where no target is masked. `is_end`: this rank embeds
        or has the head.

        `drops`: the model drops features in training.
        """
        self._sequences_per_step = sequences_per_step
        self._source = source
        self._targets_per_step = targets_per_step
        self._mesh = mesh
        self._device = device
        self._reads = is_end or source.reset_at_documents
        self._drops = drops
        # called with a microbatch's index before it is read, and with None after
        self.on_read: Callable[[int | None], object] = lambda index: None

    def step(self, step: int) -> Callable[[int], Microbatch]:
        """Return the microbatches of a training step by number. Collective over the replicas if the source masks any
        target.
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
        """The microbatch with the sequence first, of which nothing is dropped."""
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
        """Targets of the step's global batch that count in the loss. Collective over the replicas if the source masks
        any target.

        Their number is then on the device, where the loss is divided by it: the host need not wait for the sum over dp
        and cp.
        """
        if not self._source.masks_targets:
            return self._targets_per_step
        mine = sum(self._count(self._source.microbatch(step, index)) for index in range(self._source.microbatches))
        return all_reduce_(self._tensor(np.array([mine], np.int64)), self._mesh.replicas)[0]

    def _count(self, samples: SampleBatch) -> int:
        """Targets that count among this rank's tokens."""
        mask_BS = samples.loss_mask_BS
        if mask_BS is None:
            return samples.target_count // self._mesh.cp.size
        return int(self._held(mask_BS.T).sum())

    def held(self, rows: np.ndarray) -> Tensor:
        """Of rows for a whole sequence those of this rank's tokens, on the device."""
        return self._tensor(self._held(rows))

    def _held(self, rows: np.ndarray) -> np.ndarray:
        cp = self._mesh.cp
        if cp.size == 1:
            return rows
        return np.concatenate([rows[part.start : part.stop] for part in held_positions(len(rows), cp.size, cp.rank)])

    def _tensor(self, array: np.ndarray) -> Tensor:
        """On the device; through pinned memory to a GPU, because from ordinary memory the host would wait for the
        copy's turn.
        """
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
