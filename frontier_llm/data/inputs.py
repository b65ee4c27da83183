"""Find text inputs and cut them into pieces, which workers read in parallel (documents.py).

A piece is a byte range of a file of lines, a range of row groups of a parquet file, or a complete file. Pieces depend
only on the files, never on the number of workers.
"""

from __future__ import annotations

import gzip
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from frontier_llm import log
from frontier_llm.config.urls import is_url
from frontier_llm.data.remote import RemoteFile, located, remote_files
from frontier_llm.errors import BackendError, DataError, Problem, closest
from frontier_llm.units import plural

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")
PACKED_SUFFIXES = (".gz", ".zst", ".zstd")
SUFFIXES = (*TEXT_SUFFIXES, *LINES_SUFFIXES, ".parquet", ".mds")

# Size limit of a line and of a decompressed MDS shard (Mosaic's default is 64 MiB), set by --max-mib.
MAXIMUM_BYTES = 128 << 20
MAXIMUM_FOOTER_BYTES = 32 << 20  # Limit for a parquet file, enough for about 100,000 column chunks.
BUFFER_BYTES = 1 << 20  # Bytes of a parquet column that are read at a time. pyarrow's default is a complete row group.
DATASET = "dataset://"  # Prefix of a dataset on the Hugging Face Hub (hub.py).
PARTS_FOLDER = re.compile(r".*\.parts-[0-9a-f]{12}")  # Folders of tokenize.py, whose JSON files are no inputs.
TOO_LARGE = "has more than {}; if the input is correct, give a larger --max-mib"

Kind = Literal["text", "lines", "jsonl", "parquet", "mds"]


@dataclass(frozen=True)
class InputPiece:
    """Part of a file that one worker reads: bytes [start, stop), or row groups of a parquet file.

    A compressed file is one piece.
    """

    path: str  # a local path or a URL
    kind: Kind
    start: int
    stop: int
    size_bytes: int  # number of bytes with which the progress bar counts this piece


def _is_input(path: Path | RemoteFile) -> bool:
    """Return whether a file is a text input. Records of datasets (`.meta.json`) are not."""
    return not path.name.endswith(".meta.json") and _plain_suffix(path) in SUFFIXES


def find_inputs(
    paths: Iterable[str | Path],
    is_input: Callable[[Path | RemoteFile], bool] = _is_input,
    content: str = "text, JSONL, parquet or MDS",
    known: str = f"known endings: {', '.join(SUFFIXES)}, and {'/'.join(PACKED_SUFFIXES)} of text and JSONL",
) -> list[Path | RemoteFile]:
    """Return the given files, and every file of a known kind below the given directories, sorted by path.

    URLs and datasets of the Hugging Face Hub are accepted too. Raises a DataError that names every path that is missing
    or of an unknown kind, and every directory without inputs.
    """
    inputs: list[Path | RemoteFile] = []
    problems = []
    for path in map(str, paths):
        files = _files(path)
        if not files and not is_url(path) and not Path(path).is_dir():
            siblings = [child.name for child in Path(path).parent.iterdir()] if Path(path).parent.is_dir() else []
            near = closest(Path(path).name, siblings)
            fix = f"did you mean {Path(path).with_name(near)}?" if near else "check the path"
            problems.append(Problem(where=str(Path(path).absolute()), what="no such file or directory", fix=fix))
            continue
        # index.json beside MDS shards only repeats their headers
        shards = {_folder(file) for file in files if ".mds" in file.name}
        inside = [
            file for file in files if is_input(file) and not (file.name == "index.json" and _folder(file) in shards)
        ]
        if [str(file) for file in files] == [str(located(path))] and not inside:
            problems.append(Problem(where=str(files[0]), what=f"unknown kind {files[0].suffix!r}", fix=known))
        elif not inside:
            if path.startswith(DATASET):
                separator = "&" if "?" in path else "?"
                others = f"{known}; for a dataset of the Hub, try {path}{separator}revision=refs/convert/parquet"
            else:
                others = known
            problems.append(Problem(where=str(located(path)), what=f"contains no {content} files", fix=others))
        elif len(inside) < len(files):
            other = next(file.name for file in files if file not in inside)
            log.info(
                f"{located(path)}: reading {plural(len(inside), 'file')}, ignoring {len(files) - len(inside)} of other "
                f"kinds, e.g. {other}"
            )
        inputs += inside
    if problems or not inputs:
        raise DataError(problems or "none given", where="inputs", fix=f"give files or directories of {content}")
    return inputs


def _files(path: str) -> list[Path | RemoteFile]:
    """Return the files that a path, a URL or a dataset's name stands for, or [] if there are none."""
    if path.startswith(DATASET):
        from frontier_llm.data.hub import dataset_files

        return [located(file) for file in dataset_files(path)]
    if is_url(path):
        return [*remote_files(path)]
    if Path(path).is_dir():
        return [*sorted(_files_below(path))]
    return [located(path)] if Path(path).is_file() else []


def _files_below(folder: str) -> Iterator[Path]:
    """Yield the files below a folder. Linked folders are followed, and each folder is read once."""
    seen = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not PARTS_FOLDER.fullmatch(name))
        yield from filter(Path.is_file, (Path(parent, name) for name in names))


def _folder(file: Path | RemoteFile) -> str:
    return str(file).rpartition("/")[0]


def _plain_suffix(path: Path | RemoteFile) -> str:
    """Return the ending without compression: 'a.jsonl.zst' -> '.jsonl'."""
    return Path(path.stem).suffix if path.suffix in PACKED_SUFFIXES else path.suffix


def cut(path: str | Path | RemoteFile, documents: Literal["file", "line"], piece_bytes: int) -> list[InputPiece]:
    """Return the pieces of one file. `documents` selects whether a text file is one document or one per line."""
    path = located(path)
    size = path.stat().st_size
    suffix = _plain_suffix(path)
    name = path.url if isinstance(path, RemoteFile) else str(path)
    if suffix == ".parquet":
        return _cut_parquet(name, size, piece_bytes)
    if suffix == ".mds":
        return [InputPiece(name, "mds", 0, size, size)]
    kind: Kind = "lines" if documents == "line" else "text"
    if suffix in LINES_SUFFIXES:
        kind = "jsonl"
    if kind == "text" or path.suffix in PACKED_SUFFIXES:
        return [InputPiece(name, kind, 0, size, size)]
    return [
        InputPiece(name, kind, start, min(start + piece_bytes, size), min(piece_bytes, size - start))
        for start in range(0, size, piece_bytes)
    ]


def _cut_parquet(path: str, size: int, piece_bytes: int) -> list[InputPiece]:
    try:
        metadata = open_parquet(path).metadata
    except (OSError, ValueError):  # pyarrow's errors; they are reported as damage when the piece is read
        return [InputPiece(path, "parquet", 0, 1, size)]
    pieces = []
    start = 0
    held = 0
    for group in range(metadata.num_row_groups):
        held += metadata.row_group(group).total_byte_size
        if held >= piece_bytes or group == metadata.num_row_groups - 1:
            pieces.append(InputPiece(path, "parquet", start, group + 1, held))
            start = group + 1
            held = 0
    return pieces


def open_parquet(path: str | Path) -> Any:
    """Return a pyarrow.parquet.ParquetFile that reads columns as streams.

    Raises ValueError for a footer that claims to be larger than MAXIMUM_FOOTER_BYTES, and BackendError without pyarrow.
    """
    place = located(path)
    with place.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 8, 0))
        if (footer := int.from_bytes(file.read(4), "little")) > MAXIMUM_FOOTER_BYTES:
            raise ValueError(f"its footer has {footer} bytes, more than the limit of {MAXIMUM_FOOTER_BYTES}")
    return _pyarrow("pyarrow.parquet", place).ParquetFile(_readable(place), buffer_size=BUFFER_BYTES)


def open_packed(path: Path | RemoteFile) -> Any:
    """Return the content of a compressed file as a binary file. The file may have several gzip members or zstd
    frames."""
    if path.suffix == ".gz":
        return gzip.open(_readable(path))
    return _pyarrow("pyarrow", path).input_stream(_readable(path), compression="zstd")


def _readable(path: Path | RemoteFile) -> Any:
    """Return an object that libraries can open: a local path, or an open file for a remote file."""
    return path.open("rb") if isinstance(path, RemoteFile) else str(path)


def _pyarrow(module: str, path: Path | RemoteFile) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendError(
            f"reading this needs pyarrow: {error}",
            where=str(path),
            fix="pip install 'frontier-llm[data]'",
        ) from error
