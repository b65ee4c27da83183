"""One microbatch in the form that the stages receive."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    """Token ids and related tensors of one microbatch. S is the number of tokens of this context-parallel rank.

    The sequence is the first dim, so that sequence parallelism splits activations into contiguous parts.
    """

    tokens_SB: Tensor | None = None  # int64; needed by the stage with the embedding
    targets_SB: Tensor | None = None  # int64, the next tokens; needed by the stage with the head
    # document number of each position of the complete sequence; None = one document per sequence
    documents_BS: Tensor | None = None
    loss_mask_SB: Tensor | None = None  # False for targets that do not count in the loss; None = all count
    # targets of the step over all replicas: the loss is divided by this number; needed by the stage with the head
    global_targets: int | Tensor = 0
    # sequences of the step over all replicas: divisor of the routers' losses; needed by stages with experts
    global_sequences: int = 0
    # int64 sample numbers in the data, from which dropout draws its masks; None = no dropout, as in evaluation
    samples_B: Tensor | None = None
    # (sums by text, text number of each target S x B): the stage with the head adds each token's loss to its text's sum
    text_losses: tuple[Tensor, Tensor] | None = None
    # position of each token if tokens are generated one by one; None = positions count from the start
    positions_SB: Tensor | None = None
