"""Context parallelism by heads (DeepSpeed Ulysses, arXiv:2309.14509): for attention each rank has all tokens of some
heads instead of some tokens of all.

Two all-to-alls each way move a share of the queries, keys, values and outputs, however long the sequence; attention
itself is any back-end's. Each rank needs a key/value head: cp goes into those that tensor parallelism leaves it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from frontier_llm.comm import Axis, moved, start_all_to_all_into
from frontier_llm.ops import Ops, Scores


def attention_by_heads(q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores, *, ops: Ops, cp: Axis) -> Tensor:
    """This rank's rows of attention over the sequence that the ranks of `cp` hold together."""
    by_rank = [x.unflatten(2, (cp.size, -1)) for x in (q_SBaD, k_SBgD, v_SBgD)]
    heads = [x.shape[3] for x in by_rank]
    fused_KBhD = moved(torch.cat(by_rank, dim=3).flatten(2, 3), cp, _to_heads, _to_tokens)
    slopes = scores.alibi_slopes_a
    if slopes is not None:
        scores = replace(scores, alibi_slopes_a=slopes.chunk(cp.size)[cp.rank])
    q_KBaD, k_KBgD, v_KBgD = fused_KBhD.split(heads, dim=2)
    return moved(ops.attention(q_KBaD, k_KBgD, v_KBgD, scores), cp, _to_tokens, _to_heads)


def _to_heads(x_SBhD: Tensor, cp: Axis) -> Tensor:
    """Some tokens of all heads → all tokens, in the order of the sequence, of this rank's share of the heads."""
    sent = x_SBhD.unflatten(2, (cp.size, -1)).movedim(2, 0).contiguous()
    # every rank's first chunk; its second, which stand in reverse
    front, back = _exchanged(sent, cp).unflatten(1, (2, -1)).unbind(1)
    return torch.cat((front, back.flip(0))).flatten(0, 1)


def _to_tokens(x_KBhD: Tensor, cp: Axis) -> Tensor:
    """The way back."""
    front, back = x_KBhD.unflatten(0, (2, cp.size, -1)).unbind(0)
    sent = torch.stack((front, back.flip(0)), dim=1).flatten(1, 2)
    return _exchanged(sent, cp).movedim(0, 2).flatten(2, 3)


def _exchanged(sent: Tensor, cp: Axis) -> Tensor:
    arriving = torch.empty_like(sent)
    start_all_to_all_into(arriving, sent, cp).wait()
    return arriving
