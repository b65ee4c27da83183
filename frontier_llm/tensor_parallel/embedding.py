"""Vocabulary-parallel embedding: each rank holds a slice of the rows, looks up what it has, and the sum over tp is the lookup."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from frontier_llm.tensor_parallel.context import LayerContext
from frontier_llm.tensor_parallel.mappings import sum_partial
from frontier_llm.tensor_parallel.parameter import ShardedParameter


class _Lookup(Function):
    """Rows of this rank's slice, zeros for tokens of other slices."""

    @staticmethod
    def forward(ctx: Any, tokens_SB: Tensor, weight_vH: ShardedParameter, context: LayerContext) -> Tensor:
        first_row = weight_vH.shape[0] * context.tp.rank
        local = tokens_SB - first_row
        ctx.context, ctx.weight, ctx.first_row = context, weight_vH, first_row
        ctx.save_for_backward(tokens_SB)
        if context.tp.size == 1:
            return F.embedding(local, weight_vH.detach())
        elsewhere = (local < 0) | (local >= weight_vH.shape[0])
        return F.embedding(local.masked_fill(elsewhere, 0), weight_vH.detach()).masked_fill_(elsewhere[..., None], 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens_SB,), context, weight, first_row = ctx.saved_tensors, ctx.context, ctx.weight, ctx.first_row
        grad_NH = grads[0].flatten(0, -2)
        tokens_N = tokens_SB.flatten()
        return (
            None,
            context.gradients.submit(weight, lambda grad: context.ops.embedding_backward_(grad, tokens_N, grad_NH, first_row)),
            None,
        )


def vocab_parallel_embedding(tokens_SB: Tensor, weight_vH: ShardedParameter, context: LayerContext) -> Tensor:
    """(S, B) token ids → (S or s, B, H)."""
    return sum_partial(_Lookup.apply(tokens_SB, weight_vH, context), context.tp, context.sequence_parallel)
