"""One microbatch as the stages see it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    """Token ids with the sequence first, so that sequence parallelism cuts contiguous messages."""

    tokens_SB: Tensor  # int64
    targets_SB: Tensor  # int64, the next tokens
    documents_BS: Tensor | None = None  # document number of each position; None = one document per sequence
    loss_mask_SB: Tensor | None = None  # False where a target does not count; None = all count
    positions_SB: Tensor | None = None  # where each token stands, when tokens are fed one by one; None = counted from the start

    @property
    def shape(self) -> tuple[int, int]:
        """(S, B)."""
        return self.tokens_SB.shape[0], self.tokens_SB.shape[1]
