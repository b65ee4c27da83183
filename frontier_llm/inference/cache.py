"""Attention that remembers: keys and values of earlier tokens stay in a cache, so that a new token costs one row of work.

It stands in the model's place for the attention op (`Ops.attention`), so the transformer itself is the one that trains. Slot t of a row
holds the token at position t. Prompts of unequal length are padded on the right: a padded slot is seen by no earlier position, and
is overwritten when its row's generation reaches it, before any query may look at it. So no mask for padding exists at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from frontier_llm.ops import Scores


class KeyValueCache:
    """Keys and values of this rank's layers for B rows of up to T positions."""

    def __init__(self, layers: int, rows: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates 2 · layers · B · g · T · D elements; `kv_heads` are this rank's."""
        shape = (layers, 2, rows, kv_heads, slots, head_dim)
        self._store = torch.zeros(shape, dtype=dtype, device=device)
        self._rows_B = torch.arange(rows, device=device)
        self._positions_SB: Tensor | None = None
        self._layer = 0
        self._length = 0
        self._first = True

    @property
    def slots(self) -> int:
        """Positions that fit."""
        return self._store.shape[4]

    def begin(self, positions_SB: Tensor) -> None:
        """Start a forward pass over tokens at these positions; each layer then calls `extend` once, in order."""
        self._first = self._length == 0
        self._positions_SB, self._layer = positions_SB, 0
        self._length = max(self._length, int(positions_SB.max()) + 1)

    def extend(self, k_SBgD: Tensor, v_SBgD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store the tokens' keys and values. Returns k_BgTD, v_BgTD of all positions so far, and the new tokens' positions."""
        keys, values = self._store[self._layer]
        self._layer += 1
        assert self._positions_SB is not None, "begin() starts a forward pass"
        keys[self._rows_B, :, self._positions_SB] = k_SBgD
        values[self._rows_B, :, self._positions_SB] = v_SBgD
        return keys[:, :, : self._length], values[:, :, : self._length], self._positions_SB

    @property
    def is_prefill(self) -> bool:
        """True in the first pass, whose tokens stand at positions 0, 1, … and see only each other."""
        return self._first


class RememberingAttention:
    """The attention op of an inference model: with a cache it sees earlier tokens, without one it is the training op."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor, Scores], Tensor]) -> None:
        self._attention = attention
        self.cache: KeyValueCache | None = None

    def __call__(self, q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
        """o_SBaD; see ops.reference.attention. Documents are a matter of training: a cache holds one document per row."""
        if self.cache is not None:
            assert scores.documents_BS is None
            k_BgTD, v_BgTD, positions_SB = self.cache.extend(k_SBgD, v_SBgD)
            if not self.cache.is_prefill:
                return attend(q_SBaD, k_BgTD, v_BgTD, positions_SB, scores.scale, scores.alibi_slopes_a)
        return self._attention(q_SBaD, k_SBgD, v_SBgD, scores)


def attend(q_SBaD: Tensor, k_BgTD: Tensor, v_BgTD: Tensor, positions_SB: Tensor, scale: float, alibi_slopes_a: Tensor | None) -> Tensor:
    """Attention of queries at given positions to slots 0 … position of their row; o_SBaD."""
    slots_T = torch.arange(k_BgTD.shape[2], device=q_SBaD.device)
    distance_BST = positions_SB.T[:, :, None] - slots_T
    bias_BaST = torch.zeros((), dtype=torch.float32, device=q_SBaD.device)
    if alibi_slopes_a is not None:
        bias_BaST = -alibi_slopes_a[None, :, None, None] * distance_BST[:, None]
    bias_BaST = torch.where(distance_BST[:, None] < 0, -math.inf, bias_BaST).to(q_SBaD.dtype)
    o_BaSD = F.scaled_dot_product_attention(
        q_SBaD.permute(1, 2, 0, 3),
        k_BgTD,
        v_BgTD,
        attn_mask=bias_BaST,
        scale=scale,
        enable_gqa=q_SBaD.shape[2] != k_BgTD.shape[1],
    )
    return o_BaSD.permute(2, 0, 1, 3)
