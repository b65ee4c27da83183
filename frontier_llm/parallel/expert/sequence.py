"""Splits and gathers the sequence around an MoE layer if the run uses no sequence parallelism.

Attention then has all positions on each tp rank, but for the experts each tp rank routes only its part of the sequence.
"""

from __future__ import annotations

from torch import Tensor

from frontier_llm.comm import Axis, all_gather, moved


def take_part(x_SBH: Tensor, tp: Axis) -> Tensor:
    """Take this rank's part of the sequence: (S, B, H), equal on all ranks → (s, B, H).

    Backward all-gathers the gradient, so that each rank has the gradient of all positions.
    """
    if tp.size == 1:
        return x_SBH
    return moved(x_SBH, tp, lambda x, tp: _part(x, tp).clone(), _whole)


def gather_sequence(x_sBH: Tensor, tp: Axis) -> Tensor:
    """Gather the sequence: (s, B, H) → (S, B, H). Backward takes this rank's part of the gradient.

    The gradient of the result must be equal on all ranks.
    """
    return x_sBH if tp.size == 1 else moved(x_sBH, tp, _whole, _part)


def _part(x_SBH: Tensor, tp: Axis) -> Tensor:
    return x_SBH.chunk(tp.size)[tp.rank]


def _whole(x_sBH: Tensor, tp: Axis) -> Tensor:
    return all_gather(x_sBH.contiguous(), tp)
