"""Tests readers with decompression bombs: small files that decompress to a gigabyte.

Each reader stops at its size limit, within the CPU time and the memory that the fuzzer allows. `-s` prints both.
"""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

from frontier_llm.data import documents
from frontier_llm.data.documents import Damage, Text, read
from frontier_llm.data.inputs import cut, find_inputs
from frontier_llm.errors import DataError
from tests.attacks.fuzz import refused

MIB = b"x" * (1 << 20)


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


# file name: (compression function, first bytes of the content)
BOMBS: dict[str, tuple[Callable[[bytes], bytes], bytes]] = {
    "a.jsonl.gz": (gzip.compress, b'{"text": "'),
    "a.jsonl.zst": (zstd, b'{"text": "'),
    "shard.00000.mds.gz": (gzip.compress, b"\1\0\0\0"),
    "shard.00000.mds.zstd": (zstd, b"\1\0\0\0"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_gigabyte_of_one_line(name: str, tmp_path: Path) -> None:
    pack, start = BOMBS[name]

    def unpack(data: bytes) -> bool:
        (tmp_path / name).write_bytes(data)
        (path,) = find_inputs([tmp_path / name])
        items = [item for piece in cut(path, "file", 1 << 20) for item in read(piece)]
        return "has more than 128.0 MiB; if the input is correct, give a larger --max-mib" in items[0].why and all(
            isinstance(item, Damage) for item in items
        )

    bomb = pack(start) + pack(MIB) * 1024
    assert len(bomb) < 2 << 20
    assert refused(name, unpack, [bomb], {tmp_path}) == 1


def test_an_endless_line_ends_a_packed_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PASSED_BYTES", 1000)
    path = tmp_path / "a.jsonl.gz"
    lines = [b'{"text": "a"}', b"x" * 1500, b'{"text": "b"}', b"x" * 2500, b'{"text": "c"}']
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    (piece,) = cut(path, "file", 1 << 20)
    first, damage, second, *end = read(piece, max_bytes=1000)
    assert (first, second) == (Text("a"), Text("b")) and isinstance(damage, Damage) and damage.where == f"{path}:2"
    assert [item.where for item in end] == [
        f"{path}:4",
        str(path),
    ] and "one line of more than 2.0 KiB, so the rest of the file is skipped" in end[1].why
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (piece,) = cut(tmp_path / "a.jsonl", "file", 1 << 20)
    assert list(read(piece, max_bytes=1000))[-1] == Text("c"), "a file that is as long as it says costs what it weighs"


@pytest.mark.parametrize("name", ["a.jsonl.xz", "a.jsonl.bz2", "a.txt.lzma"])
def test_what_packs_harder_is_not_unpacked_at_all(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(lzma.compress(MIB))
    with pytest.raises(DataError, match=r"unknown kind '\.(xz|bz2|lzma)'"):
        find_inputs([tmp_path / name])
