"""The oracle's dropout: Philox 4x32-10 (Salmon et al. 2011), one counter at a time in Python's integers.

The key is the first 8 bytes, little endian, of BLAKE2b of "SEED:PLACE.dropout". A token's counters
consist of its sample's number (high 64 bits), its position (next 32 bits) and j = 0, 1, … n - 1. n is ceil(H / 8).

The words of block j have eight halves of 16 bits, lower halves first. They belong to features j, j + n, j + 2n … A
feature whose half is below 65536 times the rate is 0. The others are divided by the share that is kept.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def words(counter: int, key: int) -> list[int]:
    """Return the four 32-bit words that Philox computes from one counter and one key."""
    c = [counter >> (32 * i) & 0xFFFFFFFF for i in range(4)]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        first = c[0] * 0xD2511F53
        second = c[2] * 0xCD9E8D57
        c = [(second >> 32) ^ c[1] ^ k[0], second & 0xFFFFFFFF, (first >> 32) ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def factors(seed: int, place: str, sample: int, length: int, features: int, rate: float) -> Tensor:
    """Return factors (S, H) for each feature of each token of a sample."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{place}.dropout".encode(), digest_size=8).digest(), "little")
    n = -(-features // 8)
    least = round(rate * 65536)
    rows = []
    for position in range(length):
        row = [0.0] * (8 * n)
        for j in range(n):
            for place_of_word, word in enumerate(words((sample << 64) + (position << 32) + j, key)):
                for half, bits in enumerate((word & 0xFFFF, word >> 16)):
                    row[j + n * (2 * place_of_word + half)] = 0.0 if bits < least else 1 / (1 - least / 65536)
        rows.append(row[:features])
    return torch.tensor(rows, dtype=torch.float64)
