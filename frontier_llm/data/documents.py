"""The documents inside a piece of an input, and its damage.

Damage (a line that is no JSON, bytes that are no UTF-8, a stream that ends too soon) is yielded where it is found, named by file and
line, and left to the caller's policy.
"""

from __future__ import annotations

import codecs
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from frontier_llm.data import mds
from frontier_llm.data.inputs import PACKED_SUFFIXES, Piece, open_parquet
from frontier_llm.data.optional import optional
from frontier_llm.errors import DataError, suggest

BLOCK_BYTES = 1 << 20
ARRAY_HINT = "; a file with one large JSON value? It takes one object per line: jq -c '.[]' FILE > FILE.jsonl"
DAMAGE_FIX = "mend the input (iconv -f LATIN1 -t UTF-8 for text in another encoding), or leave such inputs out with --skip-damaged"
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
CHUNK_BYTES = 4 << 20  # a longer text file becomes one document of several sequences, cut at newlines, so that memory stays bounded


@dataclass(frozen=True)
class Text:
    """Some text; `ends_document` is False when the same document goes on in the next one."""

    text: str
    ends_document: bool = True


@dataclass(frozen=True)
class Damage:
    """Input that cannot be used: where (file:line) and why."""

    where: str
    why: str


def read(piece: Piece, text_key: str = "text") -> Iterator[Text | Damage]:
    """The documents of a piece, and its damage, in order; `text_key` names the JSON field or parquet column."""
    if piece.kind == "parquet":
        yield from _read_parquet(piece, text_key)
    elif piece.kind == "mds":
        yield from _read_mds(piece, text_key)
    elif piece.kind == "text":
        yield from _read_whole(piece)
    else:
        yield from _read_lines(piece, text_key)


def _read_lines(piece: Piece, text_key: str) -> Iterator[Text | Damage]:
    first_line: int | None = None
    for number, line in enumerate(_lines(piece)):
        outcome: Text | str | None
        if isinstance(line, Damage):
            yield line
            continue
        if number == 0 and piece.start == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        outcome = _parse_json(line, text_key) if piece.kind == "jsonl" else _decode(line)
        if isinstance(outcome, str):
            if first_line is None:
                first_line = _line_number(piece)
            yield Damage(f"{piece.path}:{first_line + number}", outcome)
        elif outcome is not None:
            yield outcome


def _parse_json(line: bytes, text_key: str) -> Text | str | None:
    """The text of a JSONL line, a reason why there is none, or None for a blank line or an empty text."""
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except ValueError as error:  # also UnicodeDecodeError
        spans_lines = line.lstrip()[:1] in (b"[", b"{") and line.rstrip()[-1:] in (b"[", b"{", b",")
        return f"is no JSON: {error}{ARRAY_HINT if spans_lines else ''}"
    if not isinstance(record, dict):
        return f"is a JSON {type(record).__name__}, not an object"
    if text_key not in record:
        return f"has no key {text_key!r}; " + suggest(text_key, list(record)[:20])
    return _usable(record[text_key], text_key)


def _usable(text: object, text_key: str) -> Text | str | None:
    if not isinstance(text, str):
        return f"{text_key!r} is {type(text).__name__}, not a string"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text_key!r} holds half a surrogate pair at character {error.start}"
    return Text(text) if text else None


def _decode(line: bytes) -> Text | str | None:
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        return f"is not UTF-8 at byte {error.start}: {error.reason}"
    return Text(text) if text.strip() else None


def _read_whole(piece: Piece) -> Iterator[Text | Damage]:
    """One document; a file above CHUNK_BYTES comes in several texts. A chunk that is not UTF-8 is left out and named."""
    held, line, begun, open_document = b"", 1, False, False
    blocks = _blocks(piece)
    for block in blocks:
        if isinstance(block, Damage):
            yield block
            break
        held += block
        if len(held) < CHUNK_BYTES:
            continue
        held, begun = held if begun else held.removeprefix(codecs.BOM_UTF8), True
        end = held.rfind(b"\n") + 1 or _character_end(held)
        chunk = _chunk(piece, held[:end], line, False)
        open_document = open_document or isinstance(chunk, Text)
        yield chunk
        line, held = line + held.count(b"\n", 0, end), held[end:]
    held = held if begun else held.removeprefix(codecs.BOM_UTF8)
    if held:
        last = _chunk(piece, held, line, True)
        open_document = open_document and not isinstance(last, Text)
        yield last
    if open_document:
        yield Text("", True)


def _character_end(data: bytes) -> int:
    """Where the last whole UTF-8 character ends, for a chunk without a newline."""
    back = next((back for back in range(1, min(5, len(data))) if data[-back] & 0xC0 != 0x80), 1)
    return len(data) - back if data[-back] & 0x80 else len(data)


def _chunk(piece: Piece, data: bytes, line: int, last: bool) -> Text | Damage:
    try:
        return Text(data.decode(), last)
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        return Damage(f"{piece.path}:{line}", "is UTF-16, not UTF-8" if data.startswith(UTF_16) else f"is not UTF-8: {error.reason}")


def _lines(piece: Piece) -> Iterator[bytes | Damage]:
    """Lines whose first byte lies in the piece, newline included."""
    if Path(piece.path).suffix not in PACKED_SUFFIXES:
        with Path(piece.path).open("rb") as handle:
            if piece.start:
                handle.seek(piece.start - 1)
                handle.readline()  # the line that began before this piece belongs to the one before
            while handle.tell() < piece.stop and (line := handle.readline()):
                yield line
        return
    held = b""
    for block in _blocks(piece):
        if isinstance(block, Damage):
            yield block
            return
        *lines, held = (held + block).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if held:
        yield held


def _blocks(piece: Piece) -> Iterator[bytes | Damage]:
    """The file's content in blocks, decompressed; a damaged or truncated stream ends in Damage."""
    path = Path(piece.path)
    with path.open("rb") as handle:
        raw = iter(lambda: handle.read(BLOCK_BYTES), b"")
        if path.suffix not in PACKED_SUFFIXES:
            yield from raw
            return
        yield from _decompress(path, raw, handle)


def _decompress(path: Path, raw: Iterator[bytes], handle: BinaryIO) -> Iterator[bytes | Damage]:
    """gzip members or zstd frames, one after another."""
    if path.suffix != ".gz":
        zstandard = optional("zstandard", path)
        errors: tuple[type[Exception], ...] = (zstandard.ZstdError,)

        def fresh() -> Any:
            return zstandard.ZstdDecompressor().decompressobj()
    else:
        errors = (zlib.error,)

        def fresh() -> Any:
            return zlib.decompressobj(wbits=31)

    stream, begun = fresh(), False
    try:
        for data in raw:
            while data:
                begun = True
                output = stream.decompress(data)
                if output:
                    yield output
                data = stream.unused_data if stream.eof else b""
                if stream.eof:
                    stream, begun = fresh(), False
    except errors as error:
        yield Damage(f"{path} (near compressed byte {handle.tell()})", f"cannot be decompressed, the rest is left out: {error}")
        return
    if begun:
        yield Damage(f"{path} (compressed byte {handle.tell()})", "the compressed stream ends too soon; the file is truncated")


def _line_number(piece: Piece) -> int:
    """The 1-based number of the piece's first line; reads the file up to there, so only asked when something is damaged."""
    if piece.start == 0 or Path(piece.path).suffix in PACKED_SUFFIXES:
        return 1
    count, left = 1, piece.start
    with Path(piece.path).open("rb") as handle:
        while left > 0 and (block := handle.read(min(BLOCK_BYTES, left))):
            count += block.count(b"\n")
            left -= len(block)
        handle.seek(piece.start - 1)
        return count if handle.read(1) == b"\n" else count + 1


def _read_parquet(piece: Piece, text_key: str) -> Iterator[Text | Damage]:
    try:
        file = open_parquet(piece.path)
        if text_key not in file.schema_arrow.names:
            yield Damage(piece.path, f"has no column {text_key!r}; " + suggest(text_key, file.schema_arrow.names[:20]))
            return
        row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
        for batch in file.iter_batches(row_groups=list(range(piece.start, piece.stop)), columns=[text_key], batch_size=1024):
            for value in batch.column(0).to_pylist():
                outcome = _usable(value, text_key)
                if isinstance(outcome, str):
                    yield Damage(f"{piece.path} row {row}", outcome)
                elif outcome is not None:
                    yield outcome
                row += 1
    except (OSError, ValueError) as error:
        yield Damage(f"{piece.path} (row groups {piece.start} to {piece.stop - 1})", f"cannot be read: {error}")


def _read_mds(piece: Piece, text_key: str) -> Iterator[Text | Damage]:
    """A shard's texts; what follows a damaged sample is left out with it."""
    try:
        yield from (Text(text) for text in mds.read_texts(piece.path, text_key) if text)
    except DataError as error:
        yield from (Damage(problem.where, f"{problem.what}; {problem.fix}") for problem in error.problems)
