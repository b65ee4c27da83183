"""Embedding and cross-entropy over a vocabulary that is split over tp.

Embedding: each rank looks up the rows that it holds, with zeros for other tokens. The sum over tp is the result.

Cross-entropy: three numbers per token are all-gathered instead of the logits. Each rank reduces its slice of the logits
to (max, sum of exp, target logit). All ranks combine the triples of all ranks in the same order, so the loss is bitwise
equal over tp. Backward overwrites the logits with their gradient. The (S·B, v) buffer is the largest activation of the
last stage. With this method it exists only once, and never in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm import all_gather, all_reduce_, reduce_scatter
from frontier_llm.parallel.tensor.context import LayerContext
from frontier_llm.parallel.tensor.parameter import ShardedParameter


class _Embedding(Function):
    """Looks up the rows of this rank's slice, with zeros for tokens that other ranks hold, and sums over tp.

    The result covers the sequence (S), or with sequence parallelism this rank's part of the sequence (s).
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
        (grad,) = grads
        (tokens_SB,) = ctx.saved_tensors
        context = ctx.context
        first_row = ctx.first_row
        grad_SBH = all_gather(grad, context.tp) if context.sequence_parallel else grad
        tokens_N = tokens_SB.flatten()
        grad_NH = grad_SBH.flatten(0, -2)

        def accumulate(gradient_vH: Tensor) -> None:
            context.ops.embedding_backward_(gradient_vH, tokens_N, grad_NH, first_row)

        return None, context.gradients.submit(ctx.weight, accumulate), None


def vocab_parallel_embedding(tokens_SB: Tensor, weight_vH: ShardedParameter, context: LayerContext) -> Tensor:
    """Look up the embeddings of token ids: (S, B) → (S or s, B, H)."""
    return _Embedding.apply(tokens_SB, weight_vH, context)


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        targets_N: Tensor,
        first_vocab: int,
        context: LayerContext,
    ) -> tuple[Tensor, Tensor]:
        stats_3N = context.ops.cross_entropy_stats(logits_Nv, targets_N, first_vocab)
        maxima_tN, sums_tN, targets_tN = all_gather(stats_3N[None], context.tp).unbind(1)
        maximum_N = maxima_tN.amax(0)
        logsumexp_N = maximum_N + (sums_tN * (maxima_tN - maximum_N).exp()).sum(0).log()
        # The logits are not saved by `save_for_backward`, because backward writes into them.
        ctx.context = context
        ctx.first_vocab = first_vocab
        ctx.logits = logits_Nv
        ctx.save_for_backward(targets_N, logsumexp_N)
        ctx.set_materialize_grads(False)
        return logsumexp_N - targets_tN.sum(0), logsumexp_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        targets_N, logsumexp_N = ctx.saved_tensors
        logits_Nv = ctx.logits
        ctx.logits = None
        loss_N, sum_N = grads  # `sum_N` is None unless a loss term reads the log-sum-exp
        both_N = loss_N if sum_N is None else loss_N + sum_N
        grad_Nv = ctx.context.ops.cross_entropy_backward_(
            logits_Nv,
            targets_N,
            ctx.first_vocab,
            logsumexp_N,
            both_N.contiguous(),
        )
        # The op subtracts 1 at the target. The gradient of the log-sum-exp is the softmax without this subtraction, so
        # add it back.
        if sum_N is not None:
            column_N = targets_N - ctx.first_vocab
            mine_N = (column_N >= 0) & (column_N < grad_Nv.shape[1])
            given_N = torch.where(mine_N, sum_N, 0).to(grad_Nv.dtype)
            grad_Nv.scatter_add_(1, torch.where(mine_N, column_N, 0)[:, None], given_N[:, None])
        return grad_Nv, None, None, None


def vocab_parallel_cross_entropy(
    logits_SBv: Tensor,
    targets_SB: Tensor,
    first_vocab: int,
    context: LayerContext,
) -> tuple[Tensor, Tensor]:
    """Return (-log p(target), log-sum-exp of the logits) per token, each (S, B) in fp32 (fp64 under fp64).

    `first_vocab` is the vocabulary id of this rank's first logit. The logits must not be used afterwards, because
    backward overwrites them.
    """
    both_N = _CrossEntropy.apply(logits_SBv.flatten(0, 1), targets_SB.flatten(), first_vocab, context)
    loss_SB, logsumexp_SB = (one_N.view(targets_SB.shape) for one_N in both_N)
    return loss_SB, logsumexp_SB


def mean_over_global_batch(loss_SB: Tensor, global_tokens: int | Tensor) -> Tensor:
    """Return this microbatch's contribution to the step's mean loss.

    Only this function divides by the number of tokens. Collectives only sum the contributions.
    """
    return loss_SB.sum() / global_tokens
