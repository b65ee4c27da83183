"""Vocabulary-parallel cross-entropy: one small all-gather of three numbers per token instead of the logits themselves.

Each rank reduces its slice to (max, sum of exp, target logit); from all ranks' triples every rank computes the same
log-sum-exp in the same order, so the loss is bitwise equal over tp. Backward overwrites the logits with their gradient:
the (S·B, v) buffer is the largest activation of the last stage and is never held twice, nor in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm import all_gather
from frontier_llm.parallel.tensor.context import LayerContext


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
