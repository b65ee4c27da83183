"""From the data room's numpy microbatches to the model's tensors on this rank's device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from frontier_llm.comm import Axis, all_reduce_
from frontier_llm.data.loader import Batches
from frontier_llm.model import Microbatch
from frontier_llm.train.build import FetchMicrobatch


def fetch_from(batches: Batches, device: torch.device) -> FetchMicrobatch:
    """(step, index) → the microbatch with the sequence first, on `device`."""

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    def fetch(step: int, index: int) -> Microbatch:
        batch = batches.microbatch(step, index)
        tokens_S1B = batch.tokens_BS1.T
        return Microbatch(
            tensor(tokens_S1B[:-1]),
            tensor(tokens_S1B[1:]),
            None if batch.documents_BS is None else tensor(batch.documents_BS),
            None if batch.loss_mask_BS is None else tensor(batch.loss_mask_BS.T),
        )

    return fetch


def count_targets(batches: Batches, step: int, dp: Axis) -> int:
    """Targets of a step's global batch that count in the loss. Collective over dp where documents are masked."""
    if not batches.reset_at_documents:
        return batches.global_batch * batches.samples.sequence_length
    mine = sum(batches.microbatch(step, index).target_count for index in range(batches.microbatches))
    return int(all_reduce_(torch.tensor(mine, dtype=torch.int64), dp))
