"""Context parallelism by gathering keys and values (Llama 3, arXiv:2407.21783, section 3.3.2).

This method supports any mask, and with grouped-query attention it moves few bytes. A rank holds two chunks of the
sequence. The first chunks of all ranks are the front half of the sequence. The second chunks are the back half, in
reverse order of the ranks. Each half has its own all-gather, and a local flip of the back half's chunks restores the
order of the keys. The first chunk of queries attends only to the front half, so its attention runs while the back half
is gathered. Backward gathers keys and values again, because otherwise every layer would keep cp times the keys and
values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm import Axis, Pending, start_all_gather_into, start_reduce_scatter
from frontier_llm.ops import Ops, Scores
from frontier_llm.parallel.context.blocks import Query, queries_of


def gathered_attention(q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores, *, ops: Ops, cp: Axis) -> Tensor:
    """Attention of this rank's queries over the complete sequence, whose tokens are split over `cp`."""
    return _Gathered.apply(q_SBaD, k_SBgD, v_SBgD, scores, ops, cp)


class _Keys:
    """Keys and values of the complete sequence, gathered in two halves."""

    def __init__(self, k_SBgD: Tensor, v_SBgD: Tensor, cp: Axis) -> None:
        """Start the all-gathers of both halves. Collective over `cp`."""
        both_S2BgD = torch.stack((k_SBgD, v_SBgD), dim=1)
        front, back = both_S2BgD.chunk(2)
        self._size = len(both_S2BgD) // 2 * cp.size  # positions of one half of the sequence
        self.whole_K2BgD = both_S2BgD.new_empty(2 * self._size, *both_S2BgD.shape[1:])
        self._reversed = torch.empty_like(self.whole_K2BgD[: self._size])
        self._arriving: list[Pending] = [
            start_all_gather_into(self.whole_K2BgD[: self._size], front, cp),
            start_all_gather_into(self._reversed, back, cp),
        ]
        self._cp = cp

    def seen_by(self, query: Query) -> tuple[Tensor, ...]:
        """Return (keys, values) from the first position up to the last position of the chunk `query`.

        The chunks must be passed in the order of the sequence.
        """
        last = query.positions.stop
        self._arriving[0].wait()
        if last > self._size:
            self._arriving[1].wait()
            self.whole_K2BgD[self._size :].copy_(_chunks_reversed(self._reversed, self._cp.size))
        return self.whole_K2BgD[:last].unbind(1)


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scores: Scores, ops: Ops, cp: Axis) -> Tensor:
        keys = _Keys(k, v, cp)
        outputs = []
        sums = []
        for query in queries_of(q.shape[0], cp):
            seen = range(query.positions.stop)
            o_QBaD, logsumexp_BaQ = ops.attention_block(q[query.rows], keys.seen_by(query), query.scores(scores, seen))
            outputs.append(o_QBaD)
            sums.append(logsumexp_BaQ)
        o_SBaD = torch.cat(outputs)
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
        keys = _Keys(k, v, cp)
        grad_q = torch.zeros_like(q)
        grad_K2BgD = torch.zeros_like(keys.whole_K2BgD)
        half = len(grad_K2BgD) // 2
        parts: list[tuple[Tensor, Pending]] = []
        for query, logsumexp_BaQ in zip(queries_of(q.shape[0], cp), sums, strict=True):
            rows = query.rows
            last = query.positions.stop
            seen_KBgD = keys.seen_by(query)
            # Only the second chunk of queries attends to the back half. The back half is processed first, so that its
            # gradients are sent while the front half is processed.
            for seen in (range(half, last), range(half)) if last > half else (range(last),):
                stretch = slice(seen.start, seen.stop)
                grad_q_QBaD, *grads = ops.attention_block_backward(
                    grad_SBaD[rows],
                    q[rows],
                    tuple(x[stretch] for x in seen_KBgD),
                    o[rows],
                    logsumexp_BaQ,
                    query.scores(ctx.scores, seen),
                )
                grad_q[rows].add_(grad_q_QBaD)  # `+=` on an indexed tensor would make one more copy of the sum
                for to_KBgD, grad_KBgD in zip(grad_K2BgD[stretch].unbind(1), grads, strict=True):
                    to_KBgD += grad_KBgD
                if seen.start:
                    parts.append(start_reduce_scatter(_chunks_reversed(grad_K2BgD[half:], cp.size), cp))
        parts.insert(0, start_reduce_scatter(grad_K2BgD[:half], cp))
        for _, pending in parts:
            pending.wait()
        grad_k, grad_v = torch.cat([part for part, _ in parts]).unbind(1)
        return grad_q, grad_k, grad_v, None, None, None


def _chunks_reversed(half: Tensor, cp: int) -> Tensor:
    """Reverse the order of the cp chunks in a half of the sequence."""
    return half.unflatten(0, (cp, -1)).flip(0).flatten(0, 1)
