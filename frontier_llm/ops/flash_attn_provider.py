"""Attention back-end that uses the flash-attn package (on ROCm its CK build). It has never run on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .reference import Scores


class FlashAttention:
    """Attention by the flash-attn package. Without `deterministic`, the backward sums the query gradient with
    atomics.
    """

    def __init__(self, deterministic: bool = False) -> None:
        self._deterministic = deterministic

    def attention(self, q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
        """Return causal attention o_SBaD.

        Documents use flash-attn's variable-length function, so each document must be contiguous in its sequence.
        """
        import flash_attn  # type: ignore[import-not-found, unused-ignore]

        options: dict[str, Any] = {
            "softmax_scale": scores.scale,
            "causal": True,
            "deterministic": self._deterministic,
        }
        if scores.window:
            options["window_size"] = (scores.window - 1, 0)
        if scores.alibi_slopes_a is not None:
            options["alibi_slopes"] = scores.alibi_slopes_a.float()
        q_BSaD, k_BSgD, v_BSgD = (x.transpose(0, 1) for x in (q_SBaD, k_SBgD, v_SBgD))
        if scores.documents_BS is None:
            return flash_attn.flash_attn_func(q_BSaD, k_BSgD, v_BSgD, **options).transpose(0, 1)
        starts, longest = document_starts(scores.documents_BS)
        packed = [x.flatten(0, 1) for x in (q_BSaD, k_BSgD, v_BSgD)]
        o_TaD = flash_attn.flash_attn_varlen_func(*packed, starts, starts, longest, longest, **options)
        return o_TaD.view(q_BSaD.shape).transpose(0, 1)


attention = FlashAttention().attention


def document_starts(documents_BS: Tensor) -> tuple[Tensor, int]:
    """Return flash-attn's cu_seqlens (int32, with the end) and the length of the longest document.

    A document is a run of equal ids in one row of (B, S). cu_seqlens are positions in the flattened tensor.
    """
    first_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    first_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    starts = torch.cat(
        [first_BS.flatten().nonzero()[:, 0], torch.tensor([documents_BS.numel()], device=documents_BS.device)]
    ).int()
    return starts, int(starts.diff().max())
