"""The microbatch that pipeline stages receive: token ids, targets, masks and positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    """Token ids and related tensors of one microbatch. S is the number of tokens per sequence on this cp rank.

    The sequence is the first dim, so that sequence parallelism splits activations into contiguous parts.
    """

    tokens_SB: Tensor | None = None  # int64; needed by the stage with the embedding
    targets_SB: Tensor | None = None  # int64, the next tokens; needed by the stage with the head.
    # Document number of each position of the complete sequence; None = one document per sequence
    documents_BS: Tensor | None = None
    loss_mask_SB: Tensor | None = None  # False for targets that are excluded from the loss; None = all count.
    # Number of targets of the step over all replicas, by which the loss is divided; needed by the stage with the head
    global_targets: int | Tensor = 0
    # number of sequences of the step over all replicas, by which the routers' losses are divided; needed by stages with
    # experts
    global_sequences: int = 0
    # int64 numbers of the samples in the data, which determine dropout's masks; None = no dropout, as in evaluation
    samples_B: Tensor | None = None
    # for the evaluation of tasks: (sum of losses of each text, number of the text to which each target belongs (S, B));
    # the stage with the head adds each target's loss to the sum of its text
    text_losses: tuple[Tensor, Tensor] | None = None
    # position of each token if tokens are generated one by one; None = positions count from the start
    positions_SB: Tensor | None = None
