"""`.bin/.idx` files: round trips, streaming, atomicity, and damage reported by file and byte."""

from __future__ import annotations

import errno
import os
import struct
import tracemalloc
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.data import indexed
from frontier_llm.data.indexed import DTYPES, IndexedDataset, optimal_dtype
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.meta import DatasetMeta, read_meta, write_meta
from frontier_llm.errors import DataError

documents_of_sequences = st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=20), max_size=4), max_size=12)


def write(prefix: Path, documents: list[list[list[int]]], dtype: str = "u2") -> None:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()


@given(documents_of_sequences)
@settings(max_examples=40)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]) -> None:
    prefix = tmp_path_factory.mktemp("round") / "d"
    write(prefix, documents)
    dataset = IndexedDataset(prefix, scan=True)
    sequences = [sequence for document in documents for sequence in document]
    assert dataset.sequence_count == len(sequences)
    assert dataset.document_count == len(documents)
    assert [part.tolist() for part in np.split(dataset.tokens, np.cumsum(dataset.sequence_lengths))[:-1]] == sequences
    assert [dataset.document(d).tolist() for d in range(len(documents))] == [
        list(chain(*document)) for document in documents
    ]
    starts = [dataset.document_start(d) for d in range(len(documents) + 1)]
    assert dataset.document_starts().tolist() == starts
    assert dataset.one_sequence_per_document == all(len(document) == 1 for document in documents)


def test_a_dataset_in_training_has_two_descriptors_and_its_tables_are_not_copied(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", "u2") as writer:
        for _ in range(20_000):
            writer.add_sequence([1, 2], learnt=False)
            writer.end_document()
    before = len(os.listdir("/proc/self/fd"))
    dataset = IndexedDataset(tmp_path / "d", scan=False)
    assert dataset.read(0, 3).tolist() == [1, 2, 1]
    assert len(os.listdir("/proc/self/fd")) == before + 2
    tracemalloc.start()
    try:
        assert dataset.document_at(30_000) == 15_000 and not dataset.learnt(30_000, 5).any()
        assert tracemalloc.get_traced_memory()[1] < 20_000  # bytes; the table of pointers has 160,000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", sorted(DTYPES.values(), key=str), ids=str)
def test_every_dtype(tmp_path: Path, dtype: np.dtype) -> None:
    with IndexedWriter(tmp_path / "d", dtype) as writer:
        writer.add_document(np.array([1, 2, 127], dtype))
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.dtype == dtype
    assert dataset.document(0).tolist() == [1, 2, 127]


def test_float_codes_are_megatrons(tmp_path: Path) -> None:
    # GPT-NeoX swaps these two codes
    for code, dtype in ((6, "f8"), (7, "f4")):
        with IndexedWriter(tmp_path / dtype, dtype) as writer:
            writer.add_document(np.array([1.5], dtype))
        assert (tmp_path / f"{dtype}.idx").read_bytes()[17] == code


def test_optimal_dtype() -> None:
    assert optimal_dtype(65499) == np.uint16
    assert optimal_dtype(65500) == np.int32


def test_append_equals_writing_at_once(tmp_path: Path) -> None:
    first = [[[1, 2], [3]], []]
    second = [[[4]], [[5, 6, 7]]]
    write(tmp_path / "a", first)
    write(tmp_path / "b", second)
    write(tmp_path / "both", first + second)
    with IndexedWriter(tmp_path / "joined", "u2") as writer:
        writer.append(IndexedDataset(tmp_path / "a"))
        writer.append(IndexedDataset(tmp_path / "b"))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"joined{ending}").read_bytes() == (tmp_path / f"both{ending}").read_bytes()


def test_tables_longer_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [[[1, 2], [3]], [[4]], [], [[5], [6, 7, 8], [9]], [[10, 11]]]
    write(tmp_path / "one", documents)
    monkeypatch.setattr(indexed, "SCAN_CHUNK", 2)
    write(tmp_path / "many", documents)
    with IndexedWriter(tmp_path / "joined", "u2") as writer:
        writer.append(IndexedDataset(tmp_path / "many", scan=True))
    for name in ("many", "joined"):
        for ending in ("bin", "idx"):
            assert (tmp_path / f"{name}.{ending}").read_bytes() == (tmp_path / f"one.{ending}").read_bytes()
    patch(tmp_path / "many.idx", 34 + 4 * 7 + 8 * 5, struct.pack("<q", 0))
    with pytest.raises(DataError, match="for sequence 5"):
        IndexedDataset(tmp_path / "many")
    write(tmp_path / "plain", [[[1]]] * 5)
    assert IndexedDataset(tmp_path / "plain").one_sequence_per_document
    patch(tmp_path / "plain.idx", 34 + 12 * 5 + 8 * 3, struct.pack("<q", 4))
    assert not IndexedDataset(tmp_path / "plain", scan=False).one_sequence_per_document


def test_append_refuses_another_dtype(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1]]], "i4")
    with pytest.raises(DataError, match="int32"), IndexedWriter(tmp_path / "b", "u2") as writer:
        writer.append(IndexedDataset(tmp_path / "a"))


def test_token_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="65536"), IndexedWriter(tmp_path / "d", "u2") as writer:
        writer.add_document([65536])
    assert list(tmp_path.iterdir()) == []


def test_nothing_appears_before_finish_and_an_error_leaves_the_old_dataset(tmp_path: Path) -> None:
    write(tmp_path / "d", [[[7]]])
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "d", "u2") as writer:
        writer.add_document([1, 2, 3])
        assert IndexedDataset(tmp_path / "d").document(0).tolist() == [7]
        raise RuntimeError
    assert IndexedDataset(tmp_path / "d").document(0).tolist() == [7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write(tmp_path / "d", [[[1, 2, 3]], [[4], [5, 6]]])  # S = 3, D = 3
    return tmp_path / "d"


def patch(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("length", [*range(0, 95, 5), 94])
def test_truncated_idx(small: Path, length: int) -> None:
    idx = small.with_suffix(".idx")
    assert idx.stat().st_size == 34 + 4 * 3 + 8 * 3 + 8 * 3 == 94
    if length == 94:
        IndexedDataset(small)
        return
    idx.write_bytes(idx.read_bytes()[:length])
    with pytest.raises(DataError, match=r"d\.idx: at byte \d+: expected .*, found"):
        IndexedDataset(small)


@pytest.mark.parametrize("change", [-2, -1, 1, 2])
def test_bin_of_another_size(small: Path, change: int) -> None:
    data = small.with_suffix(".bin").read_bytes()
    small.with_suffix(".bin").write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(
        DataError,
        match=rf"d\.bin: at byte \d+: expected 12 bytes, as recorded in d\.idx, found {12 + change}",
    ):
        IndexedDataset(small)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"XX", "at byte 0: expected magic"),
        (9, struct.pack("<Q", 2), "at byte 9: expected version 1, found 2"),
        (17, b"\x09", "at byte 17: expected a dtype code"),
        (26, struct.pack("<Q", 0), "at byte 26: expected at least 1"),
        (38, struct.pack("<i", -1), r"at byte 38: expected a length >= 0 for sequence 1, found -1"),
        (54, struct.pack("<q", 4), r"at byte 54: expected pointer 6 for sequence 1, found 4"),
        (70, struct.pack("<q", 1), r"at byte 70: expected document indices from 0 to 3, found 1 to 3"),
        (78, struct.pack("<q", 9), r"at byte 86: expected document index 2 >= 9, found 3"),
    ],
)
def test_damage_is_named(small: Path, offset: int, data: bytes, message: str) -> None:
    patch(small.with_suffix(".idx"), offset, data)
    with pytest.raises(DataError, match=message):
        IndexedDataset(small)


def test_read_is_a_slice_and_notices_a_file_that_shrank(small: Path) -> None:
    dataset = IndexedDataset(small)
    assert dataset.read(2, 3).tolist() == dataset.tokens[2:5].tolist() == [3, 4, 5]
    os.truncate(small.with_suffix(".bin"), 8)
    with pytest.raises(DataError, match="at byte 4: expected 6 bytes, found 4"):
        dataset.read(2, 3)


def test_scan_can_wait(small: Path) -> None:
    patch(small.with_suffix(".idx"), 54, struct.pack("<q", 4))
    dataset = IndexedDataset(small, scan=False)
    with pytest.raises(DataError, match="at byte 54"):
        dataset.scan()


def test_legacy_format_is_recognised(small: Path) -> None:
    small.with_suffix(".idx").write_bytes(b"TNTIDX\x00\x00" + bytes(60))
    with pytest.raises(DataError, match="legacy TNTIDX"):
        IndexedDataset(small)


def test_missing_files_and_given_endings(small: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)nowhere\.bin: no such file.*nowhere\.idx"):
        IndexedDataset(small.with_name("nowhere"))
    with pytest.raises(DataError, match=rf"did you mean '{small}'"):
        IndexedDataset(f"{small}.idy")
    with pytest.raises(DataError, match=r"without its ending: .*/d$"):
        IndexedDataset(f"{small}.bin")


def test_digest_follows_content(small: Path, tmp_path: Path) -> None:
    write(tmp_path / "same", [[[9, 9, 9]], [[9], [9, 9]]])
    write(tmp_path / "other", [[[1, 2, 3]], [[4, 5], [6]]])
    # the digest covers lengths, not tokens
    assert IndexedDataset(small).digest() == IndexedDataset(tmp_path / "same").digest()
    assert IndexedDataset(small).digest() != IndexedDataset(tmp_path / "other").digest()


@given(st.data())
@settings(max_examples=150)
def test_any_damaged_byte_is_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    prefix = tmp_path_factory.mktemp("fuzz") / "d"
    write(prefix, [[[1, 2, 3]], [[4], [5, 6]], []])
    size = prefix.with_suffix(".idx").stat().st_size
    for _ in range(data.draw(st.integers(1, 3))):
        patch(prefix.with_suffix(".idx"), data.draw(st.integers(0, size - 1)), bytes([data.draw(st.integers(0, 255))]))
    try:
        dataset = IndexedDataset(prefix)
    except DataError as error:
        assert "d.idx" in str(error) or "d.bin" in str(error)
        return
    read = [token for number in range(dataset.document_count) for token in dataset.document(number).tolist()]
    assert read == dataset.tokens.tolist()


def test_other_tokens_have_another_identity_whatever_their_lengths(tmp_path: Path) -> None:
    def identity(name: str, changed: int | None = None, lengths: tuple[int, ...] = (700, 900)) -> str:
        tokens = np.arange(sum(lengths)) % 50
        if changed is not None:
            tokens[changed] += 1
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            for document in np.split(tokens, np.cumsum(lengths)[:-1]):
                writer.add_document(document)
        return IndexedDataset(tmp_path / name).identity()

    same = [identity(name) for name in ("a", "b")]
    others = [identity("c", 0), identity("d", 1599), identity("e", lengths=(900, 700))]
    assert same[0] == same[1] and len({same[0], *others}) == 4


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000, 10**6])
def test_blocks_of_a_digest_reach_from_end_to_end(size: int) -> None:
    starts = indexed._evenly(size, 1)
    assert len(starts) == min(size, 256) and (starts[0], starts[-1]) == (0, size - 1)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    with IndexedWriter(tmp_path / "text", "uint16") as writer:
        writer.add_document([1, 2, 3])
    dataset = IndexedDataset(tmp_path / "text")
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix == ending:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=rf"text\{ending}: cannot be read: Permission denied"):
        IndexedDataset(tmp_path / "text")
    monkeypatch.undo()
    if ending == ".bin":
        monkeypatch.setattr(os, "pread", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(DataError, match=r"text\.bin: cannot be read: Input/output error"):
            dataset.read(0, 3)


def test_another_dataset_of_the_same_name_takes_the_record_along(tmp_path: Path) -> None:
    """Every writer removes the record of the replaced dataset. Beside other tokens, this record would let the wrong
    tokenizer pass.
    """
    write(tmp_path / "d", [[[1]]])
    write_meta(tmp_path / "d", DatasetMeta("bytes", "0" * 64, 257, 256, 1, 1, text_bytes=1))
    write(tmp_path / "d", [[[2]]])
    assert read_meta(tmp_path / "d") is None
