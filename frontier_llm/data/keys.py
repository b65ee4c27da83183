"""Keys of pseudo-random orders: the same on every machine, in every version."""

from __future__ import annotations

import hashlib
from typing import Literal

Packing = Literal["concatenate", "best-fit"]


def derive_key(*parts: object) -> int:
    """A 64-bit key from a purpose and its parameters."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def order_key(kind: Packing | Literal["synthetic"], seed: int, number: int) -> int:
    """The order of the samples of stream `number` of a run (`data/position.py`), or of the source at that place of a
    held-out set.
    """
    if kind == "synthetic":
        first = derive_key("synthetic", seed)
        return first if number == 0 else derive_key("phase", first, number + 1)
    return derive_key("source" if kind == "concatenate" else "best-fit", seed, number)
