"""One shard file: a safetensors file whose header follows from the manifest, hashed while it is written and while it is read.

Layout: u64 header length, JSON header padded with spaces to 8 bytes, then for each kind (master, exp_avg, exp_avg_sq) every piece,
row-major, without gaps. Any safetensors reader opens it. Because the header is a pure function of the manifest, reading
compares bytes instead of parsing what a file claims. The digest is that of `digest`; in checkpoints of version 1 the file's sha256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from frontier_llm.checkpoint.digest import BLOCK_BYTES, TURN_BLOCKS, WORKERS, block_count, block_digests, combine, spread
from frontier_llm.checkpoint.manifest import ITEM_BYTES, DamagedCheckpoint, Manifest, Shard
from frontier_llm.failpoints import hit
from frontier_llm.optim import KINDS

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
    """Create the file, flush it to the device, return its digest; blocks are hashed right before they are written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write_turn(index: int) -> bytes:
        start = index * TURN_BLOCKS * BLOCK_BYTES
        part = data[start : start + TURN_BLOCKS * BLOCK_BYTES]
        digests = block_digests(part)
        write_all(descriptor, part, len(head) + start)
        hit("checkpoint.block_written")
        return digests

    try:
        hit("checkpoint.shard_created")
        write_all(descriptor, memoryview(head), 0)
        blocks = spread(write_turn, block_count(len(data), TURN_BLOCKS * BLOCK_BYTES))
        hit("checkpoint.shard_written")
        os.fsync(descriptor)
        hit("checkpoint.shard_synced")
    finally:
        os.close(descriptor)
    return combine(head, blocks)


def write_all(descriptor: int, data: memoryview, start: int) -> None:
    """os.pwrite from byte `start` of the file on, until everything is taken."""
    while data:
        count = os.pwrite(descriptor, data, start)
        data, start = data[count:], start + count


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


Consume = Callable[[Entry, int, memoryview], None]  # (entry, first element, bytes); called from several threads, for disjoint bytes


def verify(path: Path, manifest: Manifest, shard: Shard, consume: Consume | None = None, drop_cache: bool = False) -> None:
    """Read the whole file in blocks, hash it, and hand every part of an entry to `consume` on the way.

    With `drop_cache` the page cache is asked to forget the file first, so that the device is read.
    Raises DamagedCheckpoint with the expected and the found digest and the file's tensors.
    """
    expected = header_of(manifest, shard, path)
    with opened(path, shard.bytes) as descriptor:
        if drop_cache:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        check_header(descriptor, path, expected)
        found = _read_and_hash(descriptor, path, manifest, shard, expected, consume)
    if found != shard.sha256:
        names = list(dict.fromkeys(manifest.tensors[tensor].name for tensor, _, _ in shard.pieces))
        listing = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise DamagedCheckpoint(f"is damaged: digest {found}, expected {shard.sha256}; it holds {listing}", where=str(path))


def _read_and_hash(descriptor: int, path: Path, manifest: Manifest, shard: Shard, head: bytes, consume: Consume | None) -> str:
    whole = hashlib.sha256(head)  # version 1: one digest over everything, so one block after the other
    block_bytes = manifest.block_bytes or BLOCK_BYTES
    turn_bytes = TURN_BLOCKS * block_bytes
    places, item = entries(shard, manifest.dtype, len(head)), ITEM_BYTES[manifest.dtype]
    starts = [place.start for place in places]
    buffers = threading.local()

    def read_turn(index: int) -> bytes:
        if not hasattr(buffers, "part"):
            buffers.part = memoryview(bytearray(min(turn_bytes, shard.bytes)))
        start = len(head) + index * turn_bytes
        part = buffers.part[: min(turn_bytes, shard.bytes - start)]
        read_exactly(descriptor, path, start, part)
        if consume is not None:
            for place in places[bisect_right(starts, start) - 1 : bisect_left(starts, start + len(part))]:
                first, stop = max(start, place.start), min(start + len(part), place.start + place.numel * item)
                consume(place, (first - place.start) // item, part[first - start : stop - start])
        if manifest.version == 1:
            whole.update(part)
            return b""
        return block_digests(part, block_bytes)

    blocks = spread(read_turn, block_count(shard.bytes - len(head), turn_bytes), workers=1 if manifest.version == 1 else WORKERS)
    return whole.hexdigest() if manifest.version == 1 else combine(head, blocks)
