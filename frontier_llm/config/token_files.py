"""The head of a Megatron `.idx` file, and how many tokens lie beside it: what a configuration may ask without
opening a dataset.
"""

from __future__ import annotations

import struct
from pathlib import Path

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes: magic, version, dtype code, sequences, documents + 1
# by code; the digit is the bytes of a token
DTYPE_NAMES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}


def stored_tokens(prefix: str) -> int:
    """Tokens in PREFIX.bin, by its size and its index' head. Raises OSError or ValueError where there is no such
    dataset.
    """
    with Path(f"{prefix}.idx").open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise ValueError("is no Megatron .idx file")
    return Path(f"{prefix}.bin").stat().st_size // int(DTYPE_NAMES[HEADER.unpack(head)[2]][1])
