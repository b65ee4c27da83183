"""Embedding and cross-entropy over a vocabulary that is split over tp.

Embedding: each rank looks up the rows that it holds, and the sum over tp is the lookup.

Cross-entropy: one small all-gather of three numbers per token instead of the logits themselves. Each rank reduces its
slice to (max, sum of exp, target logit). From all ranks' triples every rank computes the same log-sum-exp in the same
order, so the loss is bitwise equal over tp. Backward overwrites the logits with their gradient: the (S·B, v) buffer is
the largest activation of the last stage and is never held twice, nor in fp32.
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
    """(S, B) token ids → (S or s, B, H)."""
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
        # not saved tensors: backward writes into them
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
        loss_N, sum_N = grads  # of which the second is there where a loss term reads the log-sum-exp
        both_N = loss_N if sum_N is None else loss_N + sum_N
        grad_Nv = ctx.context.ops.cross_entropy_backward_(
            logits_Nv,
            targets_N,
            ctx.first_vocab,
            logsumexp_N,
            both_N.contiguous(),
        )
        # a log-sum-exp's gradient is the softmax alone: what the op took off at the target is given back
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
    """-log p(target) and the log-sum-exp of the logits per token, (S, B) in fp32 (fp64 under fp64). `first_vocab` is
    the vocabulary id of this rank's first logit.

    The logits must not be used afterwards: backward overwrites them.
    """
    both_N = _CrossEntropy.apply(logits_SBv.flatten(0, 1), targets_SB.flatten(), first_vocab, context)
    loss_SB, logsumexp_SB = (one_N.view(targets_SB.shape) for one_N in both_N)
    return loss_SB, logsumexp_SB


def mean_over_global_batch(loss_SB: Tensor, global_tokens: int | Tensor) -> Tensor:
    """This microbatch's share of the step's mean loss. The one place that divides: collectives only sum (promise 7)."""
    return loss_SB.sum() / global_tokens
