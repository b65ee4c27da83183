"""One microbatch as the stages see it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    """Token ids with the sequence first, so that sequence parallelism cuts contiguous messages; S: the tokens of
    this context-parallel rank.
    """

    tokens_SB: Tensor | None = None  # int64; needed by the stage that embeds
    targets_SB: Tensor | None = None  # int64, the next tokens; needed by the stage with the head
    # document number of each position of the whole sequence; None = one document per sequence
    documents_BS: Tensor | None = None
    loss_mask_SB: Tensor | None = None  # False where a target does not count; None = all count
    # of the step over all replicas: what the loss is divided by; needed by the stage with the head
    global_targets: int | Tensor = 0
    # of the step over all replicas: what the router's losses are divided by; needed by stages with experts
    global_sequences: int = 0
    # int64, their numbers in the data, by which dropout draws; None = nothing is dropped, as in evaluation
    samples_B: Tensor | None = None
    # (sums by text, text of each target S x B): the stage with the head adds its tokens' losses to the texts' sums
    text_losses: tuple[Tensor, Tensor] | None = None
    # where each token stands, when tokens are fed one by one; None = counted from the start
    positions_SB: Tensor | None = None
