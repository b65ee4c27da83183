"""Numbers that depend on where they are used alone, by a counter-based generator; and the op that drops features by
them.

Philox 4x32-10 (Salmon et al. 2011) turns a counter and a key into four 32-bit words, whoever asks and in whatever
order. So initial weights (`model/initialize.py`) and dropout's masks are the same in every layout, and a recomputed
layer draws the masks of the first time again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .dtypes import statistics_dtype

WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
HALVES_PER_BLOCK = 8  # 4 words of 32 bits


def stream_key(seed: int, name: str) -> int:
    """64 bits for each seed and name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")


def philox(low: Tensor, key: int, high: Tensor | None = None) -> list[Tensor]:
    """The four 32-bit words of each block, as i64; its counter is low + 2^64 high, both below 2^63, `key` has 64
    bits.
    """
    low, high = torch.broadcast_tensors(low, torch.zeros_like(low) if high is None else high)
    c0 = low & WORD
    c1 = low >> 32
    c2 = high & WORD
    c3 = high >> 32
    k0 = key & WORD
    k1 = key >> 32
    for _ in range(_ROUNDS):
        # i64 products wrap around like unsigned ones; shifting them gives copies of the sign, which the mask takes away
        first = c0 * _MULTIPLIERS[0]
        second = c2 * _MULTIPLIERS[1]
        c0 = ((second >> 32) & WORD).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = ((first >> 32) & WORD).bitwise_xor_(c3).bitwise_xor_(k1)
        c1 = second.bitwise_and_(WORD)
        c3 = first.bitwise_and_(WORD)
        k0 = (k0 + _WEYL[0]) & WORD
        k1 = (k1 + _WEYL[1]) & WORD
    return [c0, c1, c2, c3]


@dataclass(frozen=True)
class Mask:
    """Which features of which tokens are set to 0: a function of the key, of each token's sample and position in it,
    and of the feature.
    """

    key: int  # of the run's seed and the place in the model
    threshold: int  # of 2^16: the rate
    samples_B: Tensor  # i64, numbers of the samples in the run's data
    positions_S: Tensor  # i64, of the rows that are dropped from, wherever this rank holds them

    @property
    def signed_key(self) -> int:
        """The same 64 bits as kernels are given them."""
        return self.key - (self.key >> 63 << 64)

    @property
    def scale(self) -> float:
        """What the others are multiplied by, so that nothing changes on average."""
        return 1 / (1 - self.threshold / 2**16)


def kept_features(mask: Mask, features: int) -> Tensor:
    """(S, B, H), False where a feature is dropped.

    Block j of a token's counters gives the halves of features j, j + n, j + 2n … of n = H / 8: neighbours in memory are
    drawn by neighbouring blocks.
    """
    blocks = -(-features // HALVES_PER_BLOCK)
    low_S1n = (mask.positions_S << 32)[:, None, None] + torch.arange(blocks, device=mask.positions_S.device)
    words = philox(low_S1n, mask.key, mask.samples_B[None, :, None])
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -2)
    return halves.flatten(-2)[..., :features] >= mask.threshold


def drop(x_SBH: Tensor, residual_SBH: Tensor | None, mask: Mask) -> Tensor:
    """residual + x with features set to 0 and the others scaled up (Srivastava et al. 2014), rounded once. Its
    backward is itself, without a residual.
    """
    with torch.no_grad():
        dtype = statistics_dtype(x_SBH.dtype)
        dropped = torch.where(kept_features(mask, x_SBH.shape[-1]), x_SBH.to(dtype) * mask.scale, 0)
        return (dropped if residual_SBH is None else residual_SBH.to(dtype) + dropped).to(x_SBH.dtype)
