"""Text inputs: which files there are, and how they are cut into pieces of work; documents.py reads them.

A piece is a byte range of a file of lines, a range of row groups of a parquet file, or a whole file. Pieces depend on the files
alone, never on the number of workers.
"""

from __future__ import annotations

import gzip
import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from frontier_llm import log
from frontier_llm.errors import BackendError, DataError, Problem, suggest
from frontier_llm.units import plural

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")
PACKED_SUFFIXES = (".gz", ".zst", ".zstd")
SUFFIXES = (*TEXT_SUFFIXES, *LINES_SUFFIXES, ".parquet", ".mds")

MAXIMUM_BYTES = 128 << 20  # of a line, and of an MDS shard (Mosaic's own default is 64 MiB) after decompression; --max-mib
MAXIMUM_FOOTER_BYTES = 32 << 20  # of a parquet file: some 100,000 columns of row groups
BUFFER_BYTES = 1 << 20  # of a parquet file's column that is read; without it all of a row group's
MORE = "holds more than {}; if that is right, give a larger --max-mib"

Kind = Literal["text", "lines", "jsonl", "parquet", "mds"]


@dataclass(frozen=True)
class InputPiece:
    """Part of a file that one worker reads: bytes [start, stop), or row groups of a parquet file; all of a compressed file."""

    path: str
    kind: Kind
    start: int
    stop: int
    size_bytes: int  # what it counts for in the progress bar


def _is_input(path: Path) -> bool:
    """A text input; an MDS dataset's index.json only repeats what its shards say, and our records are no text."""
    if path.name.endswith(".meta.json") or (path.name == "index.json" and any(path.parent.glob("*.mds*"))):
        return False
    return _plain_suffix(path) in SUFFIXES


def find_inputs(
    paths: Iterable[str | Path],
    is_input: Callable[[Path], bool] = _is_input,
    content: str = "text, JSONL, parquet or MDS",
    known: str = f"known endings: {', '.join(SUFFIXES)}, and {'/'.join(PACKED_SUFFIXES)} of text and JSONL",
) -> list[Path]:
    """The files, and every file of a known kind in the directories (recursively, sorted by path).

    Raises DataError naming every path that is missing or of an unknown kind, and for a directory without inputs.
    """
    inputs: list[Path] = []
    problems = []
    for path in map(Path, paths):
        if path.is_dir():
            files = sorted(child for child in path.rglob("*") if child.is_file())
            inside = [child for child in files if is_input(child)]
            others = [child.name for child in files if not is_input(child)]
            if inside and others:
                log.info(f"{path}: read {plural(len(inside), 'file')}, left {len(others)} of other kinds, e.g. {others[0]}")
            if not inside:
                problems.append(Problem(str(path), f"holds no {content} files", known))
            inputs += inside
        elif not path.is_file():
            siblings = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
            fix = suggest(path.name, siblings[:20]) if siblings else "check the path"
            problems.append(Problem(str(path), "no such file or directory", fix))
        elif not is_input(path):
            problems.append(Problem(str(path), f"unknown kind {path.suffix!r}", known))
        else:
            inputs.append(path)
    if problems or not inputs:
        raise DataError(problems or "none given", where="inputs", fix=f"name files or directories of {content}")
    return inputs


def _plain_suffix(path: Path) -> str:
    """The ending without compression: 'a.jsonl.zst' -> '.jsonl'."""
    return Path(path.stem).suffix if path.suffix in PACKED_SUFFIXES else path.suffix


def cut(path: Path, documents: Literal["file", "line"], piece_bytes: int) -> list[InputPiece]:
    """The pieces of one file; `documents` says whether a text file is one document or one per line."""
    size, suffix = path.stat().st_size, _plain_suffix(path)
    if suffix == ".parquet":
        return _cut_parquet(path, piece_bytes)
    if suffix == ".mds":
        return [InputPiece(str(path), "mds", 0, size, size)]
    kind: Kind = "lines" if documents == "line" else "text"
    if suffix in LINES_SUFFIXES:
        kind = "jsonl"
    if kind == "text" or path.suffix in PACKED_SUFFIXES:
        return [InputPiece(str(path), kind, 0, size, size)]
    return [
        InputPiece(str(path), kind, start, min(start + piece_bytes, size), min(piece_bytes, size - start))
        for start in range(0, size, piece_bytes)
    ]


def _cut_parquet(path: Path, piece_bytes: int) -> list[InputPiece]:
    size = path.stat().st_size
    try:
        metadata = open_parquet(path).metadata
    except (OSError, ValueError):  # pyarrow's errors; reading the piece reports it as damage
        return [InputPiece(str(path), "parquet", 0, 1, size)]
    pieces, start, held = [], 0, 0
    for group in range(metadata.num_row_groups):
        held += metadata.row_group(group).total_byte_size
        if held >= piece_bytes or group == metadata.num_row_groups - 1:
            pieces.append(InputPiece(str(path), "parquet", start, group + 1, held))
            start, held = group + 1, 0
    return pieces


def open_parquet(path: str | Path) -> Any:
    """A pyarrow.parquet.ParquetFile, which reads a column as a stream. Raises ValueError for a footer that no file has."""
    with Path(path).open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 8, 0))
        if (footer := int.from_bytes(file.read(4), "little")) > MAXIMUM_FOOTER_BYTES:
            raise ValueError(f"a footer of {footer} bytes, more than {MAXIMUM_FOOTER_BYTES}")
    return _pyarrow("pyarrow.parquet", path).ParquetFile(str(path), buffer_size=BUFFER_BYTES)


def open_packed(path: Path) -> Any:
    """The content of a compressed file, as a binary file: gzip members or zstd frames, one after another."""
    return gzip.open(path) if path.suffix == ".gz" else _pyarrow("pyarrow", path).input_stream(str(path), compression="zstd")


def _pyarrow(module: str, path: str | Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendError(f"reading this needs pyarrow: {error}", where=str(path), fix="pip install 'frontier-llm[data]'") from error
