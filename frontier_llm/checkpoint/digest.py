"""A shard file's digest: of its header and of each block of its data on their own, so that several threads can make it
and check it.

    sha256( sha256(header) | sha256(block 0) | sha256(block 1) | … )

A thread takes two blocks at once, which csrc/sha256_pair.cpp hashes side by side where the processor can. It hashes
right before it writes, or right after it has read, while the blocks are in its cache: the file crosses the memory bus
once, and while one thread hashes the other one is in the kernel.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from frontier_llm.errors import BackendError
from frontier_llm.libraries import load_library

T = TypeVar("T")

# 4 MiB: a Lustre RPC (1-4 MiB stripes), and two threads' blocks stay in a core complex' L3 (32 MiB on Zen) between hash
# and write
BLOCK_BYTES = 4 << 20
TURN_BLOCKS = 2  # that a thread takes at once
# per rank: an MI250X node has 8 cores for each, and the file system's lock lets one writer per file in at a time
WORKERS = 2


def combine(header: bytes, blocks: Iterable[bytes]) -> str:
    """The file's digest from its header and the digests of its data's blocks."""
    return hashlib.sha256(hashlib.sha256(header).digest() + b"".join(blocks)).hexdigest()


def block_count(data_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Blocks of so many bytes; the last one may be short."""
    return -(-data_bytes // block_bytes)


def block_digests(data: memoryview, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The digests of the blocks of `data`, one after the other."""
    pair = _pair()
    if pair is not None and len(data) == 2 * block_bytes:
        address = np.frombuffer(data, np.uint8).ctypes.data
        digests = ctypes.create_string_buffer(64)
        pair(address, address + block_bytes, block_bytes, digests)
        return digests.raw
    return b"".join(
        hashlib.sha256(data[start : start + block_bytes]).digest() for start in range(0, len(data), block_bytes)
    )


@functools.cache
def _pair() -> Callable[..., Any] | None:
    """`fl_sha256_pair`; None where it has not been built or the processor lacks the instructions: hashlib gives the
    same digests.
    """
    functions = {"fl_sha256_pair": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p])}
    with suppress(BackendError):
        return load_library("libsha256_pair.so", functions, {"fl_sha256_pair_available": 1}).fl_sha256_pair
    return None


def spread(work: Callable[[int], T], count: int, workers: int = WORKERS) -> list[T]:
    """[work(0), …, work(count - 1)], a few at a time; after the first exception nothing new begins and it is raised."""
    with ThreadPoolExecutor(workers, "checkpoint-block") as pool:
        return list(pool.map(work, range(count)))
