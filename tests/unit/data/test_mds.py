"""Tests reading of Mosaic MDS shards. MDSWriter of mosaicml-streaming 0.13.0 wrote the folders in `mds_shards/`, each
with 40 or 5 samples.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.inputs import find_inputs
from frontier_llm.data.mds import open_column, read_texts, read_tokens
from frontier_llm.data.tokenize import TokenizeOptions, tokenize
from frontier_llm.errors import DataError

SHARDS = Path(__file__).parent / "mds_shards"


@pytest.mark.parametrize("kind", ["text-None", "text-zstd"])
def test_text_column(kind: str) -> None:
    files = find_inputs([SHARDS / kind])
    assert len(files) == 3
    assert [text for path in files for text in read_texts(path, "text")] == [
        f"sample {number} é" for number in range(40)
    ]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("tok-None", "i4"), ("tok-zstd", "i4"), ("bytes", "i8"), ("fixed", "i4"), ("dyn", "u2")],
)
def test_token_columns(kind: str, dtype: str) -> None:
    arrays = [array for path in sorted((SHARDS / kind).glob("shard*")) for array in read_tokens(path, "tokens")]
    assert len(arrays) in (5, 40)
    for number, array in enumerate(arrays):
        assert array.dtype == np.dtype(dtype)
        assert array.tolist() == list(range(number, number + 50))


def test_tokenize_reads_them(tmp_path: Path) -> None:
    meta = tokenize([SHARDS / "text-zstd"], tmp_path / "out", "bytes", workers=1)
    assert meta.documents == 40
    assert bytes(IndexedDataset(tmp_path / "out").document(39)[:-1].tolist()).decode() == "sample 39 é"
    with pytest.raises(DataError, match="has the encoding int, not str"):
        tokenize([SHARDS / "text-zstd"], tmp_path / "n", "bytes", TokenizeOptions(text_key="n"), workers=1)


def shard(samples: list[bytes], names: list[str], encodings: list[str], sizes: list[int | None]) -> bytes:
    header = json.dumps({"column_names": names, "column_encodings": encodings, "column_sizes": sizes}).encode()
    ends = np.cumsum([4 + 4 * (len(samples) + 1) + len(header), *map(len, samples)])
    return struct.pack(f"<{len(ends) + 1}I", len(samples), *ends) + header + b"".join(samples)


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shard.00000.mds"
    good = shard([struct.pack("<I", 2) + b"ab", struct.pack("<I", 9) + b"cd"], ["text"], ["str"], [None])
    path.write_bytes(good)
    values = read_texts(path, "text")
    assert next(values) == "ab"
    with pytest.raises(DataError, match=r"at byte \d+: sample 1 needs 13 bytes, but has 6"):
        next(values)
    path.write_bytes(good[:-1])
    with pytest.raises(DataError, match=f"expected {len(good)} bytes, found {len(good) - 1}"):
        open_column(path, "text")
    path.write_bytes(shard([b""], ["text", "source"], ["str"], [None]))
    with pytest.raises(
        DataError,
        match="its header lists 2 column_names, 1 column_encodings, 1 column_sizes, not the same number of each",
    ):
        open_column(path, "text")
    path.write_bytes(b"\x01")
    with pytest.raises(DataError, match="is not an MDS shard"):
        open_column(path, "text")
    path.write_bytes(shard([struct.pack("<I", 1) + b"\xff"], ["text"], ["str"], [None]))
    with pytest.raises(DataError, match="sample 0 is not UTF-8"):
        list(read_texts(path, "text"))
    with pytest.raises(DataError, match="did you mean 'text'"):
        open_column(path, "texts")


def test_pickles_are_never_read(tmp_path: Path) -> None:
    path = tmp_path / "shard.00000.mds"
    path.write_bytes(shard([struct.pack("<I", 1) + b"."], ["tokens"], ["pkl"], [None]))
    with pytest.raises(DataError, match="runs code when it is read"):
        next(read_tokens(path, "tokens"))


def test_token_value_that_is_no_array(tmp_path: Path) -> None:
    path = tmp_path / "shard.00000.mds"
    for value in (b"", b"\x07\x04\x02ab", b"\x10\x04\x02abc"):
        path.write_bytes(shard([struct.pack("<I", len(value)) + value], ["tokens"], ["ndarray"], [None]))
        with pytest.raises(DataError, match="sample 0 is not an array of tokens"):
            next(read_tokens(path, "tokens"))


@given(st.integers(0, 10**6), st.integers(0, 255), st.sampled_from(["text-None", "tok-None", "dyn"]))
@settings(max_examples=150)
def test_any_damaged_byte_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory,
    place: int,
    value: int,
    kind: str,
) -> None:
    content = bytearray((SHARDS / kind / "shard.00000.mds").read_bytes())
    content[place % len(content)] = value
    path = tmp_path_factory.mktemp("fuzz") / "shard.00000.mds"
    path.write_bytes(bytes(content))
    try:
        items = list(read_texts(path, "text") if kind == "text-None" else read_tokens(path, "tokens"))
    except DataError as error:
        assert str(path) in str(error)
        return
    assert len(items) <= 40
