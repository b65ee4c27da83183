"""The digest of a shard is the same however it is made: two streams in one thread, hashlib, or piece by piece."""

from __future__ import annotations

import hashlib
import random

import pytest

from frontier_llm.checkpoint import digest

SIZES = [1, 64, digest.BLOCK_BYTES, digest.BLOCK_BYTES + 63, 2 * digest.BLOCK_BYTES]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("native", [True, False])
def test_blocks_have_the_digests_of_hashlib(size: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(digest, "_pair", lambda: None)
    data = random.Random(size).randbytes(size)
    blocks = [data[start : start + digest.BLOCK_BYTES] for start in range(0, size, digest.BLOCK_BYTES)]
    assert digest.block_digests(memoryview(data)) == b"".join(hashlib.sha256(block).digest() for block in blocks)


@pytest.mark.parametrize("pattern", [b"\x00", b"\xff", b"\x80"])
def test_two_streams_do_not_mix(pattern: bytes) -> None:
    first = pattern * (1 << 20)
    second = b"a" * (1 << 20)
    found = digest.block_digests(memoryview(first + second), block_bytes=1 << 20)
    assert found == hashlib.sha256(first).digest() + hashlib.sha256(second).digest()
