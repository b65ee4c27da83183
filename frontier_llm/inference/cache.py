"""Attention with a key/value cache. With the cache, only the new token of each row passes through the model.

`RememberingAttention` replaces the attention op of the model (`Ops.attention`), so the transformer is the same as in
training. Slot t of a row holds the token at position t. Prompts of unequal length are padded on the right. The causal
mask hides a padded slot from all earlier positions. When the row's generated text reaches a padded slot, the slot is
overwritten before a query may read it. Padding therefore needs no mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from frontier_llm.ops import Scores, softcapped
from frontier_llm.ops.dtypes import product_dtype


class KeyValueCache:
    """Keys and values of this rank's layers for B rows of up to T positions, in one tensor (layers, 2, B, g, T, D)."""

    def __init__(self, store: Tensor) -> None:
        self._store = store
        self._rows_B = torch.arange(store.shape[2], device=store.device)
        self._length = 0  # number of filled positions

    @property
    def is_empty(self) -> bool:
        """True before the first forward pass."""
        return self._length == 0

    def begin(self, positions_SB: Tensor) -> None:
        """Start a forward pass over tokens at these positions, which are consecutive in each row.

        Each layer then calls `extend` once, in order.
        """
        self.is_prefill = self.is_empty  # in the first pass the tokens have positions 0, 1, … and attend to each other
        self._positions_SB = positions_SB
        self._layer = 0
        self._biases: dict[int, Tensor] = {}  # biases of this pass by window size
        low, high = (int(place) for place in positions_SB.aminmax())
        self._length = max(self._length, high + 1)
        # If all rows have equal positions, the tokens fill one block of the store. No mask is needed if each row has
        # one token at the last position, because this token attends to all filled slots.
        self._block = slice(low, high + 1) if high - low + 1 == len(positions_SB) else None
        self._sees_all = self._block is not None and low == high == self._length - 1

    def extend(self, k_SBgD: Tensor, v_SBgD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the tokens' keys and values. Returns k_BgTD and v_BgTD of all positions so far."""
        keys, values = self._store[self._layer]
        self._layer += 1
        for kept_BgTD, new_SBgD in ((keys, k_SBgD), (values, v_SBgD)):
            if self._block is None:
                kept_BgTD[self._rows_B, :, self._positions_SB] = new_SBgD
            else:
                kept_BgTD[:, :, self._block] = new_SBgD.permute(1, 2, 0, 3)
        return keys[:, :, : self._length], values[:, :, : self._length]

    def bias(self, scores: Scores, dtype: torch.dtype) -> Tensor | None:
        """Return the bias of this pass's scores, (B, 1 or a, S, T), or None if no bias is needed.

        The bias is computed once per pass for all layers with the same window.
        """
        alibi_slopes_a = scores.alibi_slopes_a
        window = scores.window or self._length
        if self._sees_all and alibi_slopes_a is None and self._length <= window:
            return None
        if window not in self._biases:
            slots_T = torch.arange(self._length, device=self._positions_SB.device)
            distance_B1ST = (self._positions_SB.T[:, :, None] - slots_T)[:, None]
            slopes = 0.0 if alibi_slopes_a is None else alibi_slopes_a[:, None, None]
            forbidden_B1ST = (distance_B1ST < 0) | (distance_B1ST >= window)
            self._biases[window] = torch.where(forbidden_B1ST, -math.inf, -slopes * distance_B1ST).to(dtype)
        return self._biases[window]


class RememberingAttention:
    """Attention op of an inference model. Queries attend to cached tokens; without a cache it is the training op."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor, Scores], Tensor]) -> None:
        self._attention = attention
        self.cache: KeyValueCache | None = None

    def __call__(self, q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
        """Return o_SBaD as ops.reference.attention does.

        A cache holds one document per row, so `scores.documents_BS` must be None with a cache.
        """
        if self.cache is not None:
            assert scores.documents_BS is None
            k_BgTD, v_BgTD = self.cache.extend(k_SBgD, v_SBgD)
            if not self.cache.is_prefill:
                return attend(q_SBaD, k_BgTD, v_BgTD, scores, self.cache.bias(scores, q_SBaD.dtype))
        return self._attention(q_SBaD, k_SBgD, v_SBgD, scores)


def attend(q_SBaD: Tensor, k_BgTD: Tensor, v_BgTD: Tensor, scores: Scores, bias: Tensor | None) -> Tensor:
    """Return the attention of queries to all slots, o_SBaD. `bias` (B, 1 or a, S, T) is added to the scores."""
    queries = q_SBaD.shape[2] // k_BgTD.shape[1]
    dtype = product_dtype(q_SBaD.dtype, q_SBaD.device)
    q_BaSD = q_SBaD.permute(1, 2, 0, 3).to(dtype)
    k_BgTD = k_BgTD.to(dtype)
    v_BgTD = v_BgTD.to(dtype)
    if bias is not None:
        bias = bias.to(dtype)
    if scores.softcap:  # torch's kernel has no score capping
        k_BaTD, v_BaTD = (x.repeat_interleave(queries, dim=1) for x in (k_BgTD, v_BgTD))
        capped_BaST = softcapped(scores.scale * (q_BaSD @ k_BaTD.transpose(-2, -1)), scores.softcap)
        o_BaSD = torch.softmax(capped_BaST if bias is None else capped_BaST + bias, dim=-1) @ v_BaTD
    else:
        o_BaSD = F.scaled_dot_product_attention(
            q_BaSD,
            k_BgTD,
            v_BgTD,
            attn_mask=bias,
            scale=scores.scale,
            enable_gqa=queries > 1,
        )
    return o_BaSD.permute(2, 0, 1, 3).to(q_SBaD.dtype)
