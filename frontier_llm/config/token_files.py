"""Counts the tokens of a Megatron dataset from the header of its `.idx` file and the size of its `.bin` file.

With this count a duration in epochs can be converted to steps without opening the dataset.
"""

from __future__ import annotations

import struct
from pathlib import Path

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes: magic, version, dtype code, sequences, documents + 1
# Name by dtype code. The digit is the number of bytes of a token.
DTYPE_NAMES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}


def stored_tokens(prefix: str) -> int:
    """Return the number of tokens in PREFIX.bin, from its size and the dtype in PREFIX.idx.

    Raises OSError or ValueError if there is no such dataset.
    """
    with Path(f"{prefix}.idx").open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise ValueError("is not a Megatron .idx file")
    return Path(f"{prefix}.bin").stat().st_size // int(DTYPE_NAMES[HEADER.unpack(head)[2]][1])
