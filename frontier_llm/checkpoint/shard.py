"""One shard file: a safetensors file whose header follows from the manifest, hashed while it is written and while it is read.

Layout: u64 header length, JSON header padded with spaces to 8 bytes, then for each kind (master, exp_avg, exp_avg_sq) every piece,
row-major, without gaps. Any safetensors reader opens it. Because the header is a pure function of the manifest, reading
compares bytes instead of parsing what a file claims.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.manifest import ITEM_BYTES, DamagedCheckpoint, Manifest, Shard
from frontier_llm.checkpoint.pieces import KINDS
from frontier_llm.failpoints import hit

# 8 MiB: large enough for a full Lustre RPC train (1-4 MiB stripes), small enough to stay in a core's L3 share between read and hash
BLOCK_BYTES = 8 << 20
BUFFERS = 4  # of a file that is being read and hashed

NamedPiece = tuple[str, tuple[int, ...], tuple[int, ...]]  # tensor name, offset, shape


@dataclass(frozen=True)
class Entry:
    """Where one kind of one piece lies in a shard file."""

    kind: str
    piece: int  # index into the shard's pieces
    start: int  # byte in the file
    numel: int


def header(pieces: Sequence[NamedPiece], dtype: str, step: int, file: str) -> bytes:
    """The file's first bytes, up to the data."""
    content: dict[str, object] = {"__metadata__": {"format": "frontier_llm checkpoint", "step": str(step), "file": file}}
    position, item = 0, ITEM_BYTES[dtype]
    for kind in KINDS:
        for name, offset, shape in pieces:
            end = position + prod(shape) * item
            # the offset makes names unique: a rank may hold several rectangles of one tensor
            content[f"{kind}/{name}@{','.join(map(str, offset))}"] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
            position = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def header_of(manifest: Manifest, shard: Shard, where: Path) -> bytes:
    """The first bytes that a shard of this manifest must have; raises DamagedCheckpoint when they and the data do not fill it."""
    named = [(manifest.tensors[tensor].name, offset, shape) for tensor, offset, shape in shard.pieces]
    head = header(named, manifest.dtype, manifest.progress.step, shard.file)
    expected_bytes = len(head) + shard.numel * len(KINDS) * ITEM_BYTES[manifest.dtype]
    if shard.bytes != expected_bytes:
        raise DamagedCheckpoint(f"has {shard.bytes} bytes by the manifest, its pieces need {expected_bytes}", where=str(where))
    return head


def entries(shard: Shard, dtype: str, data_start: int) -> list[Entry]:
    """All entries in file order."""
    found, position, item = [], data_start, ITEM_BYTES[dtype]
    for kind in KINDS:
        for index, (_, _, shape) in enumerate(shard.pieces):
            found.append(Entry(kind, index, position, prod(shape)))
            position += prod(shape) * item
    return found


def write(path: Path, head: bytes, data: memoryview) -> str:
    """Create the file, flush it to the device, return its sha256; the hash runs beside write and flush (all release the GIL)."""
    digest = hashlib.sha256(head)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        hit("checkpoint.shard_created")
        write_all(descriptor, memoryview(head))
        with ThreadPoolExecutor(1, "checkpoint-hash") as hasher:
            hasher.submit(digest.update, data)
            for start in range(0, len(data), BLOCK_BYTES):
                write_all(descriptor, data[start : start + BLOCK_BYTES])
                hit("checkpoint.block_written")
            hit("checkpoint.shard_written")
            os.fsync(descriptor)
            hit("checkpoint.shard_synced")
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def write_all(descriptor: int, data: memoryview) -> None:
    """os.write until everything is taken."""
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def opened(path: Path, expected_bytes: int) -> Iterator[int]:
    """A file descriptor for reading; raises DamagedCheckpoint when the file is missing, no plain file, or of another size."""
    try:
        # O_NOFOLLOW: a shard is a file of its checkpoint, never a link out of the run directory
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedCheckpoint(f"cannot be opened: {error.strerror}", where=str(path)) from error
    try:
        size = os.fstat(descriptor).st_size
        if size != expected_bytes:
            raise DamagedCheckpoint(f"has {size} bytes, the manifest says {expected_bytes}", where=str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, path: Path, start: int, buffer: memoryview) -> None:
    """Fill `buffer` from byte `start`; raises DamagedCheckpoint when the file ends early or the device fails."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[done:]], start + done)
        except OSError as error:
            raise DamagedCheckpoint(f"cannot be read at byte {start + done}: {error.strerror}", where=str(path)) from error
        if count == 0:
            raise DamagedCheckpoint(f"ends at byte {start + done}", where=str(path))
        done += count


def check_header(descriptor: int, path: Path, expected: bytes) -> None:
    """Raises DamagedCheckpoint unless the file begins with `expected`."""
    found = bytearray(len(expected))
    read_exactly(descriptor, path, 0, memoryview(found))
    if found != expected:
        position = next(index for index, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise DamagedCheckpoint(f"its header differs from the manifest at byte {position}", where=str(path))


Consume = Callable[[Entry, int, memoryview], None]  # (entry, first element, bytes)


def verify(path: Path, manifest: Manifest, shard: Shard, consume: Consume | None = None, drop_cache: bool = False) -> None:
    """Read the whole file in blocks, hash it, and hand every block to `consume` on the way.

    A block never spans two entries. With `drop_cache` the page cache is asked to forget the file first, so that the device is read.
    Raises DamagedCheckpoint with the expected and the found digest and the file's tensors.
    """
    expected = header_of(manifest, shard, path)
    item = ITEM_BYTES[manifest.dtype]
    # several, so that reading and copying do not stand still whenever the hash is behind
    buffers = [memoryview(bytearray(min(BLOCK_BYTES, shard.bytes))) for _ in range(BUFFERS)]
    with opened(path, shard.bytes) as descriptor, ThreadPoolExecutor(1, "checkpoint-hash") as hasher:
        if drop_cache:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        check_header(descriptor, path, expected)
        digest = hashlib.sha256(expected)
        hashing: deque[Future[Any]] = deque()
        number = 0
        for entry in entries(shard, manifest.dtype, len(expected)):
            for first in range(0, entry.numel, BLOCK_BYTES // item):
                count = min(BLOCK_BYTES // item, entry.numel - first)
                if len(hashing) == BUFFERS:
                    hashing.popleft().result()  # of the buffer that comes next
                block = buffers[number % BUFFERS][: count * item]
                number += 1
                read_exactly(descriptor, path, entry.start + first * item, block)
                hashing.append(hasher.submit(digest.update, block))
                if consume is not None:
                    consume(entry, first, block)
        for pending in hashing:
            pending.result()
    if digest.hexdigest() != shard.sha256:
        names = list(dict.fromkeys(manifest.tensors[tensor].name for tensor, _, _ in shard.pieces))
        listing = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise DamagedCheckpoint(f"is damaged: sha256 {digest.hexdigest()}, expected {shard.sha256}; it holds {listing}", where=str(path))
