"""A shard file's digest: of its header and of each block of its data on their own, so that several threads can make it and check it.

    sha256( sha256(header) | sha256(block 0) | sha256(block 1) | … )

A thread hashes a block right before it writes it, or right after it has read it, while the block is in its cache: the file crosses
the memory bus once, and while one thread hashes the other one is in the kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# 4 MiB: a Lustre RPC (1-4 MiB stripes), and two of them stay in a core's share of L3 between hash and write
BLOCK_BYTES = 4 << 20
WORKERS = 2  # per rank: an MI250X node has 8 cores for each, and the file system's lock lets one writer per file in at a time


def combine(header: bytes, blocks: Iterable[bytes]) -> str:
    """The file's digest from its header and the digests of its data's blocks."""
    return hashlib.sha256(hashlib.sha256(header).digest() + b"".join(blocks)).hexdigest()


def block_count(data_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Blocks of so many bytes; the last one may be short."""
    return -(-data_bytes // block_bytes)


def spread(work: Callable[[int], T], count: int, workers: int = WORKERS) -> list[T]:
    """[work(0), …, work(count - 1)], a few at a time; after the first exception nothing new begins and it is raised."""
    with ThreadPoolExecutor(workers, "checkpoint-block") as pool:
        try:
            return list(pool.map(work, range(count)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class RunningDigest:
    """The same digest for data that comes in pieces of any size."""

    def __init__(self, header: bytes) -> None:
        self._header, self._blocks = header, list[bytes]()
        self._open, self._left = hashlib.sha256(), BLOCK_BYTES

    def update(self, data: memoryview) -> None:
        """The next bytes after the header."""
        while data:
            taken = data[: self._left]
            self._open.update(taken)
            self._left -= len(taken)
            data = data[len(taken) :]
            if not self._left:
                self._close_block()

    def _close_block(self) -> None:
        self._blocks.append(self._open.digest())
        self._open, self._left = hashlib.sha256(), BLOCK_BYTES

    def hexdigest(self) -> str:
        """When all data has come."""
        if self._left < BLOCK_BYTES:
            self._close_block()
        return combine(self._header, self._blocks)
