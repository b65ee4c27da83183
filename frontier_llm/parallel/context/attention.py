"""Common interface of attention with and without context parallelism.

The arguments are this rank's queries, keys and values, and the result is this rank's output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from frontier_llm.comm import Axis
from frontier_llm.ops import Ops, Scores
from frontier_llm.parallel.context.gather import gathered_attention
from frontier_llm.parallel.context.heads import attention_by_heads
from frontier_llm.parallel.context.ring import ring_attention

# (q_SBaD, k_SBgD, v_SBgD, scores) → o_SBaD. S is this rank's tokens in the order of `topology.grid.held_positions`.
# `scores` has the document ids of the complete sequence.
Core = Callable[[Tensor, Tensor, Tensor, Scores], Tensor]
_WAYS = {"gather": gathered_attention, "ring": ring_attention, "heads": attention_by_heads}


def attention_core(ops: Ops, cp: Axis, way: str) -> Core:
    """Return the attention function of the ranks of `cp`. `way` is one of `blueprint.layout.WAYS`."""
    return ops.attention if cp.size == 1 else partial(_WAYS[way], ops=ops, cp=cp)
