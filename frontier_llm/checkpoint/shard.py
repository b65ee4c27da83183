"""Shard file of a rank: a safetensors file that is hashed while it is written and while it is read.

Layout: u64 header length, then the JSON header padded with spaces to 8 bytes, then the data. The data is ordered by
kind: the master first, then the optimizer's states. For each kind the file has every piece of that kind, row-major,
without gaps. Any safetensors reader can open the file. The header is a pure function of the manifest, so this module
computes the expected header and compares bytes, and never parses the header in the file.

The digest covers the header and each block of the data separately, so that several threads can compute it:

    sha256( sha256(header) | sha256(block 0) | sha256(block 1) | … )

A thread hashes a block directly before writing it or after reading it, while the block is in its cache. The data is
therefore read from memory only once. While one thread hashes, the other thread reads or writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import BinaryIO, TypeVar

from frontier_llm.checkpoint.manifest import FORMAT, ITEM_BYTES, DamagedCheckpoint, Manifest, SavedPiece, Shard
from frontier_llm.failpoints import hit
from frontier_llm.files import created, open_plain, write_all

T = TypeVar("T")

# Block size: 4 MiB is the size of a Lustre RPC (stripes have 1 to 4 MiB). The blocks of two threads stay in the L3
# cache of a core complex (32 MiB on Zen) between hash and write.
BLOCK_BYTES = 4 << 20
GROUP_BLOCKS = 2  # consecutive blocks that a thread reads or writes with one system call.
SYNC_GROUPS = 128  # A GiB is flushed to the device at a time, because a flush reports no progress.
# Threads per rank. An MI250X node has 8 cores per rank, and the file system's lock allows one writer per file.
WORKERS = 2


@dataclass(frozen=True)
class Extent:
    """Position of a piece's values of one kind in a shard file."""

    kind: str
    piece: int  # index into the shard's pieces
    start: int  # first byte in the file
    numel: int


@dataclass(frozen=True)
class ShardLayout:
    """Header of a shard file and the position of each piece. The layout is a pure function of the manifest."""

    head: bytes  # all bytes before the data
    entries: tuple[Extent, ...]  # in the order of their bytes in the file
    total_bytes: int
    item_bytes: int  # bytes of an element

    @property
    def data_bytes(self) -> int:
        """Number of bytes after the header."""
        return self.total_bytes - len(self.head)


def safetensors_layout(
    shapes: Mapping[str, Sequence[int]],
    dtype: str,
    metadata: Mapping[str, str],
) -> tuple[bytes, list[int]]:
    """Return the header of a safetensors file with these tensors, and a list with the first byte of each tensor.

    The file's size is the last item of the list. The header is a u64 length and padded JSON. With the padding the data
    is aligned to 8 bytes, as the format requires.
    """
    ends = list(accumulate((prod(shape) * ITEM_BYTES[dtype] for shape in shapes.values()), initial=0))
    places = zip(shapes.items(), pairwise(ends), strict=True)
    entries = {name: {"dtype": dtype, "shape": list(shape), "data_offsets": place} for (name, shape), place in places}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    head = struct.pack("<Q", len(text) + -len(text) % 8) + text + b" " * (-len(text) % 8)
    return head, [len(head) + end for end in ends]


def shard_layout(pieces: Sequence[SavedPiece], dtype: str, step: int, file: str) -> ShardLayout:
    """Return the layout of a shard file with these pieces.

    The kinds of tensors follow each other in the order in which they first occur in `pieces`.
    """
    kinds = dict.fromkeys(kind for piece in pieces for kind in piece.kinds)
    held = [(kind, index, piece) for kind in kinds for index, piece in enumerate(pieces) if kind in piece.kinds]
    # The names contain the offset, because a rank may hold several rectangles of one tensor.
    shapes = {f"{kind}/{piece.name}@{','.join(map(str, piece.offset))}": piece.shape for kind, _, piece in held}
    head, (*starts, end) = safetensors_layout(shapes, dtype, {"format": FORMAT, "step": str(step), "file": file})
    extents = (
        Extent(kind, index, start, prod(piece.shape)) for (kind, index, piece), start in zip(held, starts, strict=True)
    )
    return ShardLayout(head, tuple(extents), end, ITEM_BYTES[dtype])


def layout_of(manifest: Manifest, shard: Shard, where: Path | str) -> ShardLayout:
    """Return the layout that a shard of this manifest must have.

    Raises DamagedCheckpoint if the size in the manifest differs from the size of the layout.
    """
    layout = shard_layout(manifest.pieces_of(shard), manifest.dtype, manifest.progress.step, shard.file)
    if shard.bytes != layout.total_bytes:
        raise DamagedCheckpoint(
            f"has {shard.bytes} bytes in the manifest, but its pieces need {layout.total_bytes}",
            where=str(where),
        )
    return layout


def combine(header: bytes, blocks: Iterable[bytes]) -> str:
    """Return the digest of a file from its header and the digests of its data blocks."""
    return hashlib.sha256(hashlib.sha256(header).digest() + b"".join(blocks)).hexdigest()


def block_count(data_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return the number of blocks in `data_bytes`. The last block may be short."""
    return -(-data_bytes // block_bytes)


def block_digests(data: memoryview, block_bytes: int = BLOCK_BYTES) -> bytes:
    """Return the concatenated digests of the blocks of `data`."""
    starts = range(0, len(data), block_bytes)
    return b"".join(hashlib.sha256(data[start : start + block_bytes]).digest() for start in starts)


def on_threads(work: Callable[[int], T], count: int, workers: int = WORKERS) -> list[T]:
    """Return [work(0), …, work(count - 1)], computed on `workers` threads.

    Raises the first exception. No new call starts after an exception.
    """
    with ThreadPoolExecutor(workers, "checkpoint-block") as pool:
        return list(pool.map(work, range(count)))


def write(path: Path, head: bytes, data: memoryview, on_progress: Callable[[], object] = lambda: None) -> str:
    """Write a shard file, flush it to the device and return its digest.

    Each block is hashed directly before it is written. Several threads call `on_progress` after each system call.
    """
    with created(path) as descriptor:

        def write_group(index: int) -> bytes:
            start = index * GROUP_BLOCKS * BLOCK_BYTES
            part = data[start : start + GROUP_BLOCKS * BLOCK_BYTES]
            digests = block_digests(part)
            write_all(descriptor, part, len(head) + start)
            if (index + 1) % SYNC_GROUPS == 0:
                os.fdatasync(descriptor)
            on_progress()
            hit("checkpoint.block_written")
            return digests

        hit("checkpoint.shard_created")
        write_all(descriptor, memoryview(head), 0)
        blocks = on_threads(write_group, block_count(len(data), GROUP_BLOCKS * BLOCK_BYTES))
        hit("checkpoint.shard_written")
    hit("checkpoint.shard_synced")
    return combine(head, blocks)


@contextlib.contextmanager
def opened(path: Path, expected_bytes: int, head: bytes) -> Iterator[int]:
    """Open a shard file. Yield a file descriptor for reading.

    Raises DamagedCheckpoint if the file is missing, is not a regular file, has another size, or does not begin with
    `head`.
    """
    try:
        descriptor = open_plain(path)  # refuses links, which could point out of the run directory
    except OSError as error:
        raise DamagedCheckpoint(f"cannot be opened: {error.strerror}", where=str(path)) from error
    try:
        size = os.fstat(descriptor).st_size
        if size != expected_bytes:
            raise DamagedCheckpoint(f"has {size} bytes, but {expected_bytes} in the manifest", where=str(path))
        beginning = bytearray(len(head))
        read_exactly(descriptor, path, 0, memoryview(beginning))
        if beginning != head:
            position = next(index for index, (a, b) in enumerate(zip(beginning, head, strict=True)) if a != b)
            raise DamagedCheckpoint(f"its header differs from the manifest at byte {position}", where=str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, path: Path, start: int, buffer: memoryview) -> None:
    """Fill `buffer` from byte `start` on. Raises DamagedCheckpoint if the file ends early or a read fails."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[done:]], start + done)
        except OSError as error:
            raise DamagedCheckpoint(
                f"cannot be read at byte {start + done}: {error.strerror}",
                where=str(path),
            ) from error
        if count == 0:
            raise DamagedCheckpoint(f"is truncated: it ends at byte {start + done}", where=str(path))
        done += count


# Called with (entry, first element, bytes). Several threads call it, with disjoint bytes.
Consume = Callable[[Extent, int, memoryview], object]


def verify(
    path: Path,
    manifest: Manifest,
    shard: Shard,
    consume: Consume | None = None,
    drop_cache: bool = False,
) -> None:
    """Read and hash a complete shard file in blocks, and pass the values of its entries to `consume`.

    With `drop_cache` the kernel is first advised to drop the file's cached pages, so that the bytes come from the
    device. If the digest differs, DamagedCheckpoint with both digests and the file's tensors is raised.
    """
    layout = layout_of(manifest, shard, path)
    with opened(path, shard.bytes, layout.head) as descriptor:
        if drop_cache:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        digest = read_and_hash(descriptor, path, layout, manifest.block_bytes, consume)
    _check_digest(digest, manifest, shard, path)


def verify_stream(
    stream: BinaryIO, where: str, manifest: Manifest, shard: Shard, consume: Callable[[bytes], object]
) -> None:
    """Read and hash a complete shard from a stream without seeking, and pass its bytes to `consume` in file order.

    Raises DamagedCheckpoint for another size, header or digest, after some bytes may have been consumed.
    """
    layout = layout_of(manifest, shard, where)
    head = stream.read(len(layout.head))
    if head != layout.head:
        raise DamagedCheckpoint("its header differs from the manifest", where=where)
    consume(head)
    digests = []
    missing_bytes = layout.data_bytes
    while missing_bytes:
        block = stream.read(min(manifest.block_bytes, missing_bytes))
        if not block:
            raise DamagedCheckpoint(f"is truncated: {missing_bytes} bytes are missing", where=where)
        digests.append(hashlib.sha256(block).digest())
        consume(block)
        missing_bytes -= len(block)
    if stream.read(1):
        raise DamagedCheckpoint(f"has more than the {shard.bytes} bytes in the manifest", where=where)
    _check_digest(combine(head, digests), manifest, shard, where)


def _check_digest(digest: str, manifest: Manifest, shard: Shard, where: Path | str) -> None:
    """Raise DamagedCheckpoint, with the file's tensors, if `digest` is not the shard's."""
    if digest != shard.sha256:
        names = list(dict.fromkeys(piece.name for piece in manifest.pieces_of(shard)))
        listing = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise DamagedCheckpoint(
            f"is damaged: digest {digest}, expected {shard.sha256}; it contains {listing}",
            where=str(where),
        )


def read_and_hash(
    descriptor: int,
    path: Path,
    layout: ShardLayout,
    block_bytes: int,
    consume: Consume | None = None,
) -> str:
    """Return the digest of a file with this layout."""
    places = layout.entries
    item = layout.item_bytes
    data_start = len(layout.head)
    group_bytes = GROUP_BLOCKS * block_bytes
    starts = [place.start for place in places]
    buffers = threading.local()

    def read_group(index: int) -> bytes:
        if not hasattr(buffers, "part"):
            buffers.part = memoryview(bytearray(min(group_bytes, layout.total_bytes)))
        start = data_start + index * group_bytes
        part = buffers.part[: min(group_bytes, layout.total_bytes - start)]
        read_exactly(descriptor, path, start, part)
        if consume is not None:
            for place in places[bisect_right(starts, start) - 1 : bisect_left(starts, start + len(part))]:
                first = max(start, place.start)
                stop = min(start + len(part), place.start + place.numel * item)
                consume(place, (first - place.start) // item, part[first - start : stop - start])
        return block_digests(part, block_bytes)

    return combine(layout.head, on_threads(read_group, block_count(layout.data_bytes, group_bytes)))
