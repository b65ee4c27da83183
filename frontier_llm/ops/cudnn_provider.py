"""Attention back-end: torch's scaled_dot_product_attention with cuDNN as first choice.

With the back-end `sdpa`, torch chooses the kernel instead: torch 2.11 chooses cuDNN on some GPUs and FlashAttention on
others. On an H200 cuDNN takes half the time of FlashAttention (docs/benchmarks/h200.md).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from frontier_llm.ops import sdpa

from .reference import Scores

# If cuDNN does not support a head dim or a type, torch uses the next back-end.
_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
    """Return causal attention o_SBaD, as `sdpa.attention`."""
    with sdpa_kernel(_ORDER, set_priority=True):
        return sdpa.attention(q_SBaD, k_SBgD, v_SBgD, scores)
