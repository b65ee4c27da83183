"""Vocabulary-parallel embedding: each rank holds a slice of the rows, looks up what it has, and the sum over tp is
the lookup.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm import all_gather, all_reduce_, reduce_scatter
from frontier_llm.parallel.tensor.context import LayerContext
from frontier_llm.parallel.tensor.parameter import ShardedParameter


class _Embedding(Function):
    """Rows of this rank's slice, zeros for tokens of other slices; then the sum, whole (S) or this rank's part of
    the sequence (s).
    """

    @staticmethod
    def forward(ctx: Any, tokens_SB: Tensor, weight_vH: ShardedParameter, context: LayerContext) -> Tensor:
        first_row = weight_vH.shape[0] * context.tp.rank
        local_SB = tokens_SB - first_row
        ctx.context = context
        ctx.weight = weight_vH
        ctx.first_row = first_row
        ctx.save_for_backward(tokens_SB)
        if context.tp.size == 1:
            return F.embedding(local_SB, weight_vH.detach())
        elsewhere_SB = (local_SB < 0) | (local_SB >= weight_vH.shape[0])
        found_SBH = F.embedding(local_SB.masked_fill(elsewhere_SB, 0), weight_vH.detach()).masked_fill_(
            elsewhere_SB[..., None], 0
        )
        return (
            reduce_scatter(found_SBH, context.tp) if context.sequence_parallel else all_reduce_(found_SBH, context.tp)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None]:
        (grad,), (tokens_SB,), context, first_row = grads, ctx.saved_tensors, ctx.context, ctx.first_row
        grad_SBH = all_gather(grad, context.tp) if context.sequence_parallel else grad
        tokens_N = tokens_SB.flatten()
        grad_NH = grad_SBH.flatten(0, -2)

        def accumulate(gradient_vH: Tensor) -> None:
            context.ops.embedding_backward_(gradient_vH, tokens_N, grad_NH, first_row)

        return None, context.gradients.submit(ctx.weight, accumulate), None


def vocab_parallel_embedding(tokens_SB: Tensor, weight_vH: ShardedParameter, context: LayerContext) -> Tensor:
    """(S, B) token ids → (S or s, B, H)."""
    return _Embedding.apply(tokens_SB, weight_vH, context)
