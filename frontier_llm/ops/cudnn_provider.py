"""Attention by torch's scaled_dot_product_attention with cuDNN first. Untested here for want of a GPU."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from frontier_llm.ops import sdpa

from .reference import Scores

# what cuDNN does not take (a head dim, a type) goes to the next
_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
    """See `sdpa.attention`."""
    with sdpa_kernel(_ORDER, set_priority=True):
        return sdpa.attention(q_SBaD, k_SBgD, v_SBgD, scores)
