"""Counter-based random numbers, and dropout that uses them.

Philox 4x32-10 (Salmon et al. 2011) maps a counter and a key to four 32-bit words. The words do not depend on the rank
or on the order of the calls. Initial weights (`model/initialize.py`) and dropout masks are therefore the same in every
layout, and a recomputed layer gets the same masks again.
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
HALVES_PER_BLOCK = 8  # A Philox block has 4 words of 32 bits, so 8 halves of 16 bits.


def stream_key(seed: int, name: str) -> int:
    """Return a 64-bit key for a seed and a name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")


def philox(low: Tensor, key: int, high: Tensor | None = None) -> list[Tensor]:
    """Return the four 32-bit words of each block, as i64.

    A block's counter is low + 2^64 high, both below 2^63. `key` has 64 bits.
    """
    low, high = torch.broadcast_tensors(low, torch.zeros_like(low) if high is None else high)
    c0 = low & WORD
    c1 = low >> 32
    c2 = high & WORD
    c3 = high >> 32
    k0 = key & WORD
    k1 = key >> 32
    for _ in range(_ROUNDS):
        # i64 products wrap around like unsigned products. A right shift copies the sign bit, and the mask removes the
        # copies.
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
    """Dropout mask: a function of the key, each token's sample and position in the sample, and the feature."""

    key: int  # depends on the run's seed and on the place of this dropout in the model
    threshold: int  # dropout rate times 2^16
    samples_B: Tensor  # i64, numbers of the samples in the run's data
    positions_S: Tensor  # i64, positions in the sample, of the rows to which dropout is applied

    @property
    def signed_key(self) -> int:
        """The key's 64 bits as a signed integer, the type of the kernels' argument."""
        return self.key - (self.key >> 63 << 64)

    @property
    def scale(self) -> float:
        """Factor by which kept features are multiplied, so that the expected value is unchanged."""
        return 1 / (1 - self.threshold / 2**16)


def kept_features(mask: Mask, features: int) -> Tensor:
    """Return a mask of shape (S, B, H), False for dropped features.

    Block j of a token gives the 16-bit halves for the features j, j + n, j + 2n … Here n is H / 8 rounded up. Features
    that are neighbours in memory therefore belong to neighbouring blocks.
    """
    blocks = -(-features // HALVES_PER_BLOCK)
    low_S1n = (mask.positions_S << 32)[:, None, None] + torch.arange(blocks, device=mask.positions_S.device)
    words = philox(low_S1n, mask.key, mask.samples_B[None, :, None])
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -2)
    return halves.flatten(-2)[..., :features] >= mask.threshold


def drop(x_SBH: Tensor, residual_SBH: Tensor | None, mask: Mask) -> Tensor:
    """Return residual + dropout(x), rounded once (Srivastava et al. 2014).

    Kept features are multiplied by `mask.scale`. The backward of dropout is `drop` itself, without a residual.
    """
    with torch.no_grad():
        dtype = statistics_dtype(x_SBH.dtype)
        dropped = torch.where(kept_features(mask, x_SBH.shape[-1]), x_SBH.to(dtype) * mask.scale, 0)
        return (dropped if residual_SBH is None else residual_SBH.to(dtype) + dropped).to(x_SBH.dtype)
