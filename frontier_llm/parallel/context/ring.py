"""Context parallelism by ring attention (Liu et al. 2023, arXiv:2310.01889).

The keys and values of each rank are sent around the ring of ranks, while attention to the previous block runs. The
outputs for single blocks of keys are merged by their log-sum-exp in fp32. Backward uses the log-sum-exp over all keys,
so the gradients of the blocks are simply added. The gradients of keys and values are sent around the ring together with
their keys and values. After the last shift they are on the rank of these keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm import Axis, Pending, start_shift
from frontier_llm.ops import Ops, Scores, merge, statistics_dtype
from frontier_llm.parallel.context.blocks import Query, queries_of
from frontier_llm.topology.grid import held_positions


def ring_attention(q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores, *, ops: Ops, cp: Axis) -> Tensor:
    """Attention of this rank's queries over the complete sequence, whose tokens are split over `cp`."""
    return _Ring.apply(q_SBaD, k_SBgD, v_SBgD, scores, ops, cp)


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scores: Scores, ops: Ops, cp: Axis) -> Tensor:
        queries = list(queries_of(q.shape[0], cp))
        merged: list[tuple[Tensor, Tensor] | None] = [None for _ in queries]
        for both_S2BgD, source in _travelling(torch.stack((k, v), dim=1), cp):
            for index, query in enumerate(queries):
                for rows, keys in _seen(query, q.shape[0], cp, source):
                    block = ops.attention_block(q[query.rows], both_S2BgD[rows].unbind(1), query.scores(scores, keys))
                    merged[index] = merge(merged[index], *block)
        outputs, sums = zip(*filter(None, merged), strict=True)  # no entry is None: every query attends to itself
        o_SBaD = torch.cat(outputs).to(q.dtype)
        ctx.save_for_backward(q, k, v, o_SBaD, *sums)
        ctx.scores = scores
        ctx.ops = ops
        ctx.cp = cp
        return o_SBaD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_SBaD,) = grad_outputs
        q, k, v, o, *sums = ctx.saved_tensors
        ops = ctx.ops
        cp = ctx.cp
        wide = statistics_dtype(q.dtype)
        grad_q = torch.zeros_like(q, dtype=wide)
        # gradients of the block of keys that this rank holds now, summed over the ranks that have used this block
        arriving: tuple[Tensor, Pending] | None = None
        for both_S2BgD, source in _travelling(torch.stack((k, v), dim=1), cp):
            grad_S2BgD = torch.zeros_like(both_S2BgD, dtype=wide)
            for query, logsumexp_BaQ in zip(queries_of(q.shape[0], cp), sums, strict=True):
                own = query.rows
                for rows, keys in _seen(query, q.shape[0], cp, source):
                    grad_q_QBaD, *grads = ops.attention_block_backward(
                        grad_SBaD[own],
                        q[own],
                        both_S2BgD[rows].unbind(1),
                        o[own],
                        logsumexp_BaQ,
                        query.scores(ctx.scores, keys),
                    )
                    grad_q[own].add_(grad_q_QBaD)  # `+=` on an indexed tensor would also copy the sum to itself
                    for to_KBgD, grad_KBgD in zip(grad_S2BgD[rows].unbind(1), grads, strict=True):
                        to_KBgD += grad_KBgD
            if arriving is not None:
                arriving[1].wait()
                grad_S2BgD += arriving[0]
            arriving = start_shift(grad_S2BgD.to(q.dtype), cp)
        assert arriving is not None
        arriving[1].wait()
        grad_k, grad_v = arriving[0].unbind(1)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def _travelling(both_S2BgD: Tensor, cp: Axis) -> Iterator[tuple[Tensor, int]]:
    """Yield (keys and values of a rank, number of this rank in `cp`), beginning with the calling rank.

    The next block of keys and values is received while the caller uses the current block.
    """
    for hop in range(cp.size):
        last = hop == cp.size - 1
        shift = None if last else start_shift(both_S2BgD, cp)
        yield both_S2BgD, (cp.rank - hop) % cp.size
        if shift is not None:
            both_S2BgD, pending = shift
            pending.wait()


def _seen(query: Query, tokens: int, cp: Axis, source: int) -> Iterator[tuple[slice, range]]:
    """Yield (rows, positions) of the consecutive tokens of rank `source` to whose keys the queries may attend."""
    first = 0
    for keys in held_positions(tokens * cp.size, cp.size, source):
        if keys.start < query.positions.stop:
            yield slice(first, first + len(keys)), keys
        first += len(keys)
