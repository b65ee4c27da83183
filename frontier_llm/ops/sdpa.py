"""Attention by torch's scaled_dot_product_attention: the flash kernel on CPU, AOTriton on ROCm, flash/cuDNN on NVIDIA."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .dtypes import statistics_dtype
from .reference import Scores, score_bias


def attention(q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
    """Causal attention o_SBaD on strided views, without copies of q, k, v; see `reference.attention` for the meaning.

    ALiBi, documents and a window go in as an additive bias [B, a, S, S] of the inputs' type; without them the kernel's own causal
    mask is used, which skips the upper triangle.
    """
    q_BaSD, k_BgSD, v_BgSD = (tensor.permute(1, 2, 0, 3) for tensor in (q_SBaD, k_SBgD, v_SBgD))
    bias_BaSS: Tensor | None = None
    if scores.alibi_slopes_a is not None or scores.documents_BS is not None or scores.window:
        bias_BaSS = score_bias(q_SBaD.shape[0], k_SBgD.shape[0], scores, statistics_dtype(q_SBaD.dtype), q_SBaD.device).to(q_SBaD.dtype)
    o_BaSD = F.scaled_dot_product_attention(
        q_BaSD,
        k_BgSD,
        v_BgSD,
        attn_mask=bias_BaSS,
        is_causal=bias_BaSS is None,
        scale=scores.scale,
        enable_gqa=q_SBaD.shape[2] != k_SBgD.shape[2],
    )
    return o_BaSD.permute(2, 0, 1, 3)
