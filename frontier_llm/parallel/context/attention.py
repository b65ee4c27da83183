"""Common interface of attention with and without context parallelism, and context parallelism by heads (Ulysses).

Attention takes this rank's queries, keys and values, and returns the outputs of this rank's queries.

Context parallelism by heads is the method of DeepSpeed Ulysses (arXiv:2309.14509). During attention a rank holds all
tokens of some heads, instead of some tokens of all heads. Forward and backward have two all-to-alls each: one for
queries, keys and values, and one for the outputs. Attention itself may use any back-end. Each rank needs at least one
key/value head, so cp must divide the number of key/value heads on a tp rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from frontier_llm.comm import Axis, moved, start_all_to_all_into
from frontier_llm.ops import Ops, Scores
from frontier_llm.parallel.context.gather import gathered_attention
from frontier_llm.parallel.context.ring import ring_attention


def attention_by_heads(q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores, *, ops: Ops, cp: Axis) -> Tensor:
    """Attention of this rank's queries over the complete sequence, whose tokens are split over `cp`."""
    by_rank = [x.unflatten(2, (cp.size, -1)) for x in (q_SBaD, k_SBgD, v_SBgD)]
    heads = [x.shape[3] for x in by_rank]
    fused_KBhD = moved(torch.cat(by_rank, dim=3).flatten(2, 3), cp, _to_heads, _to_tokens)
    slopes = scores.alibi_slopes_a
    if slopes is not None:
        scores = replace(scores, alibi_slopes_a=slopes.chunk(cp.size)[cp.rank])
    q_KBaD, k_KBgD, v_KBgD = fused_KBhD.split(heads, dim=2)
    return moved(ops.attention(q_KBaD, k_KBgD, v_KBgD, scores), cp, _to_tokens, _to_heads)


def _to_heads(x_SBhD: Tensor, cp: Axis) -> Tensor:
    """Exchange this rank's tokens of all heads for all tokens of this rank's heads, in the order of the sequence."""
    sent = x_SBhD.unflatten(2, (cp.size, -1)).movedim(2, 0).contiguous()
    # Each rank holds two chunks. In rank order the first chunks are in the order of the sequence, and the second chunks
    # are in reverse order.
    front, back = _exchanged(sent, cp).unflatten(1, (2, -1)).unbind(1)
    return torch.cat((front, back.flip(0))).flatten(0, 1)


def _to_tokens(x_KBhD: Tensor, cp: Axis) -> Tensor:
    """Exchange all tokens of this rank's heads for this rank's tokens of all heads."""
    front, back = x_KBhD.unflatten(0, (2, cp.size, -1)).unbind(0)
    sent = torch.stack((front, back.flip(0)), dim=1).flatten(1, 2)
    return _exchanged(sent, cp).movedim(0, 2).flatten(2, 3)


def _exchanged(sent: Tensor, cp: Axis) -> Tensor:
    arriving = torch.empty_like(sent)
    start_all_to_all_into(arriving, sent, cp).wait()
    return arriving


# (q_SBaD, k_SBgD, v_SBgD, scores) → o_SBaD. S is this rank's tokens in the order of `topology.grid.held_positions`.
# `scores` has the document ids of the complete sequence.
Core = Callable[[Tensor, Tensor, Tensor, Scores], Tensor]
_WAYS = {"gather": gathered_attention, "ring": ring_attention, "heads": attention_by_heads}


def attention_core(ops: Ops, cp: Axis, way: str) -> Core:
    """Return the attention function for the ranks of `cp`. `way` is the name of the algorithm
    (`blueprint.layout.WAYS`).
    """
    return ops.attention if cp.size == 1 else partial(_WAYS[way], ops=ops, cp=cp)
