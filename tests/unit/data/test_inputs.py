"""Tests that splitting input files never loses or repeats a line, and that damage is reported by file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.data import documents
from frontier_llm.data.documents import Damage, Text, read
from frontier_llm.data.inputs import cut, find_inputs
from frontier_llm.errors import DataError

texts_strategy = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=30), max_size=30)


def read_all(path: Path, piece_bytes: int = 1 << 30, documents: str = "line", key: str = "text") -> list[Text | Damage]:
    return [item for piece in cut(path, documents, piece_bytes) for item in read(piece, key)]  # type: ignore[arg-type]


@given(texts_strategy, st.integers(1, 200), st.booleans())
@settings(max_examples=60)
def test_any_cut_gives_every_line_once(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    piece_bytes: int,
    ascii_only: bool,
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts),
        encoding="utf-8",
        newline="",
    )
    assert read_all(path, piece_bytes) == [Text(text) for text in texts]


@given(st.integers(1, 60))
@settings(max_examples=30)
def test_damaged_lines_keep_their_number_under_any_cut(
    tmp_path_factory: pytest.TempPathFactory, piece_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_text(
        '{"text": "one"}\n\n{"text": 2}\n{"txt": "three"}\n{"text": "fo\n[5]\n{"text": "six"}\n{"text": "\\ud800"}\n'
    )
    found = read_all(path, piece_bytes)
    assert [item.text for item in found if isinstance(item, Text)] == ["one", "six"]
    damage = [item for item in found if isinstance(item, Damage)]
    assert [item.where for item in damage] == [f"{path}:{line}" for line in (3, 4, 5, 6, 8)]
    for item, why in zip(
        damage,
        ["not a string", "did you mean 'txt'", "is not JSON", "is a JSON list", "surrogate"],
        strict=True,
    ):
        assert why in f"{item.why}; {item.fix}"


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_lines_in_several_members(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BLOCK_BYTES", 37)
    compress = gzip.compress if ending == "gz" else zstandard.ZstdCompressor().compress
    lines = [json.dumps({"text": f"line {number} é"}).encode() + b"\n" for number in range(100)]
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(compress(b"".join(lines[:50])) + compress(b"".join(lines[50:])[:-1]))
    assert read_all(path) == [Text(f"line {number} é") for number in range(100)]


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_truncated_compressed_file(tmp_path: Path, ending: str) -> None:
    import random

    compress = gzip.compress if ending == "gz" else zstandard.ZstdCompressor().compress
    words = random.Random(1)
    data = b"".join(json.dumps({"text": f"{words.random()}"}).encode() + b"\n" for _ in range(20000))
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(compress(data)[:-50000])
    found = read_all(path)
    assert isinstance(found[-1], Damage)
    assert "truncated" in found[-1].why
    assert str(path) in found[-1].where
    path.write_bytes(b"this is not compressed")
    assert [type(item) for item in read_all(path)] == [Damage]
    path.write_bytes(compress(b'{"text": "a"}') + b"garbage after the end")
    assert any(isinstance(item, Damage) for item in read_all(path))


def test_text_file_is_one_document_or_one_per_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"first\r\n\n  \nsecond")
    assert read_all(path, documents="file") == [Text("first\r\n\n  \nsecond")]
    assert read_all(path, documents="line") == [Text("first"), Text("second")]
    assert read_all(path, 3, documents="line") == [Text("first"), Text("second")]
    path.write_bytes(b"")
    assert read_all(path, documents="file") == []


def test_a_byte_order_mark_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "a.txt"
    lines = tmp_path / "a.jsonl"
    text.write_text("first\nsecond\n\ufeffthird", encoding="utf-8-sig")
    lines.write_text('{"text": "first"}\n', encoding="utf-8-sig")
    whole = [Text("first\nsecond\n\ufeffthird")]  # inside a text a byte order mark is an ordinary character
    assert read_all(text, documents="file") == whole
    assert read_all(text) == [Text("first"), Text("second"), Text("\ufeffthird")]
    assert read_all(lines) == [Text("first")]
    monkeypatch.setattr(documents, "CHUNK_BYTES", 8)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2)
    assert "".join(item.text for item in read_all(text, documents="file") if isinstance(item, Text)) == whole[0].text
    text.write_text("", encoding="utf-8-sig")
    assert read_all(text, documents="file") == []
    monkeypatch.undo()
    text.write_text("first", encoding="utf-16")
    assert read_all(text, documents="file") == [Damage(f"{text}:1", "is UTF-16, not UTF-8")]


def test_a_directory_says_what_it_leaves_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "b.jsonl", "README", "wiki_00"):
        (tmp_path / name).touch()
    assert [path.name for path in find_inputs([tmp_path])] == ["a.txt", "b.jsonl"]
    assert f"{tmp_path}: reading 2 files, ignoring 2 of other kinds, e.g. README" in capsys.readouterr().err
    (tmp_path / "README").unlink()
    (tmp_path / "wiki_00").unlink()
    find_inputs([tmp_path])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("newlines", [True, False])
def test_long_text_comes_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newlines: bool) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", 64)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 10)
    end = "\n" if newlines else " "
    text = "".join(f"zeile {number} äöü𝔘{end}" for number in range(60))
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    found = read_all(path, documents="file")
    assert len(found) > 5
    chunks = [item for item in found if isinstance(item, Text)]
    assert len(chunks) == len(found)
    assert "".join(item.text for item in chunks) == text
    assert [item.ends_document for item in chunks] == [False] * (len(chunks) - 1) + [True]


def test_bytes_that_are_no_text_are_named_and_the_document_still_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nth\xffree\n")
    assert read_all(path, documents="file") == [Damage(f"{path}:3", "is not UTF-8: invalid start byte")]
    assert [item for item in read_all(path) if isinstance(item, Damage)] == [
        Damage(f"{path}:3", "is not UTF-8 at byte 2: invalid start byte")
    ]
    monkeypatch.setattr(documents, "CHUNK_BYTES", 8)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 8)
    found = read_all(path, documents="file")
    assert found[0] == Text("one\ntwo\n", ends_document=False)
    assert isinstance(found[1], Damage)
    assert found[-1] == Text("", ends_document=True)


def test_parquet_rows_and_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [f"row {number}" for number in range(100)] + [None, ""], "n": range(102)}),
        path,
        row_group_size=10,
    )
    for piece_bytes in (1, 300, 1 << 30):
        found = read_all(path, piece_bytes)
        assert [item.text for item in found if isinstance(item, Text)] == [f"row {number}" for number in range(100)]
        assert [item for item in found if isinstance(item, Damage)] == [
            Damage(f"{path} row 100", "'text' is NoneType, not a string")
        ]
    assert len(cut(path, "file", 1)) == 11
    missing = read_all(path, key="texts")
    assert isinstance(missing[0], Damage)
    assert "did you mean 'text'" in missing[0].fix


def test_damaged_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a" * 100] * 100}), path)
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    found = read_all(path)
    assert len(found) == 1
    assert isinstance(found[0], Damage)
    assert "cannot be read" in found[0].why


def test_find_inputs(tmp_path: Path) -> None:
    for name in ("b.txt", "sub/a.jsonl.zst", "sub/c.parquet", "picture.png", "sub/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = [path.relative_to(tmp_path).as_posix() for path in find_inputs([tmp_path])]
    assert found == ["b.txt", "sub/a.jsonl.zst", "sub/c.parquet", "sub/d.py"]
    # linked folders are followed, each folder is read once, and parts of an unfinished dataset are no inputs
    for name in ("else/e.txt", "corpus/f.txt", "corpus/out.parts-0123456789ab/000000.json"):
        (tmp_path / "more" / name).parent.mkdir(parents=True)
        (tmp_path / "more" / name).touch()
    (tmp_path / "more/corpus/link").symlink_to(tmp_path / "more/else")
    (tmp_path / "more/corpus/loop").symlink_to(tmp_path / "more/corpus")
    corpus = tmp_path / "more/corpus"
    assert [path.relative_to(corpus).as_posix() for path in find_inputs([corpus])] == ["f.txt", "link/e.txt"]
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError) as error:
        find_inputs([tmp_path / "picture.png", tmp_path / "b.text", tmp_path / "nothing"])
    assert len(error.value.problems) == 3
    for words in ("unknown kind '.png'", f"did you mean {tmp_path / 'b.txt'}", "contains no text"):
        assert words in str(error.value)
    with pytest.raises(DataError, match="none given"):
        find_inputs([])


def test_missing_optional_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from frontier_llm.errors import BackendError

    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(BackendError, match=r"needs pyarrow.*(?s:.*)frontier-llm\[data\]"):
        cut(tmp_path / "a.parquet", "file", 100)


@pytest.mark.parametrize(
    "text",
    ['[{"text": "a"}, \n{"text": "b"}]\n', '{\n "text": "a"\n}\n', '[\n{"text": "a"}\n]\n'],
)
def test_one_large_json_value_gets_a_hint(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    (piece,) = cut(tmp_path / "a.json", "file", 1 << 20)
    first = next(read(piece))
    assert isinstance(first, Damage) and "one object per line: jq -c" in first.why


def test_only_text_in_another_encoding_is_to_be_converted():
    assert "iconv" in Damage("a.txt:3", "is not UTF-8: invalid start byte").repair
    assert (
        Damage("a.parquet", "has a damaged page").repair
        == "repair the input, or skip damaged inputs with --skip-damaged"
    )
