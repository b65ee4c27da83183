"""Reads the documents of one piece of an input (inputs.py cuts inputs into pieces).

Damaged input is a line that is not JSON, bytes that are not UTF-8, or a compressed stream that ends too early. A
`Damage` object with file and line is yielded in place of damaged input. The caller decides how to treat it.
"""

from __future__ import annotations

import codecs
import functools
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from frontier_llm.config.urls import without_secrets
from frontier_llm.data import mds
from frontier_llm.data.inputs import MAXIMUM_BYTES, PACKED_SUFFIXES, TOO_LARGE, InputPiece, open_packed, open_parquet
from frontier_llm.data.parquet_pages import largest_page_bytes
from frontier_llm.data.remote import RemoteFile, located
from frontier_llm.errors import DataError, suggest
from frontier_llm.units import format_bytes

BLOCK_BYTES = 1 << 20
ARRAY_HINT = "; if the file is one large JSON array, convert it to one object per line: jq -c '.[]' FILE > FILE.jsonl"
SKIP = ", or skip damaged inputs with --skip-damaged"
DAMAGE_FIX = f"repair the input{SKIP}"
ENCODING_FIX = f"convert the text, e.g. with iconv -f LATIN1 -t UTF-8{SKIP}"
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Size limit of a parquet row group or page, as a multiple of `max_bytes`. A page is decoded as one unit.
GROUP_OF_LARGEST = 8
PASSED_BYTES = MAXIMUM_BYTES  # Largest number of bytes read to find the end of a too long line in a compressed file.
# A longer text file becomes one document of several sequences, so that memory stays bounded.
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Text:
    """Text of a document or of a part of it.

    `ends_document` is False if the next text belongs to the same document. `learnt` is False if the text is only input,
    without a loss (a prompt).
    """

    text: str
    ends_document: bool = True
    learnt: bool = True


@dataclass(frozen=True)
class Damage:
    """Input that cannot be used, with its place (file:line), the reason and the repair."""

    where: str
    why: str
    fix: str = ""

    @property
    def repair(self) -> str:
        """`fix`, or the repair that follows from the reason."""
        return self.fix or (ENCODING_FIX if "not UTF-8" in self.why else DAMAGE_FIX)


class _Unpacked(io.RawIOBase):
    """Content of a compressed file.

    If the file is damaged, the content ends at the damage, and `damage` describes the fault.
    """

    damage = ""

    def __init__(self, path: Path | RemoteFile) -> None:
        self._content = open_packed(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._content.read1(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            self.damage = f"is damaged or truncated, so the rest of the file is skipped: {error}"
            return 0
        buffer[: len(data)] = data
        return len(data)


def read(
    piece: InputPiece,
    text_key: str = "text",
    max_bytes: int = MAXIMUM_BYTES,
    prompt_key: str | None = None,
) -> Iterator[Text | Damage]:
    """Yield the documents of a piece and its damage, in order. `text_key` is the JSON field or parquet column of the
    text.

    `prompt_key` is a JSON field whose text precedes the document's text. Its tokens are input and have no loss. With a
    `prompt_key`, a piece that is not JSONL is damage.

    A line, a parquet value, or a decompressed MDS shard of more than `max_bytes` is damage. At most `max_bytes` of such
    a value are held in memory. A parquet page or row group of more than GROUP_OF_LARGEST times `max_bytes` is damage
    too.
    """
    if prompt_key is not None and piece.kind != "jsonl":
        yield Damage(_name(piece), f"is not JSONL, so it has no field {prompt_key!r} for --prompt-key")
        return
    if piece.kind in ("parquet", "mds"):
        yield from (
            _read_parquet(piece, text_key, max_bytes)
            if piece.kind == "parquet"
            else _read_mds(piece, text_key, max_bytes)
        )
        return
    path = located(piece.path)
    unpacked = _Unpacked(path) if path.suffix in PACKED_SUFFIXES else None
    with io.BufferedReader(unpacked, BLOCK_BYTES) if unpacked else path.open("rb") as content:
        yield from (
            _read_whole(piece, content)
            if piece.kind == "text"
            else _read_lines(piece, content, text_key, max_bytes, prompt_key)
        )
    if unpacked and unpacked.damage:
        yield Damage(_name(piece), unpacked.damage)


def _read_lines(
    piece: InputPiece,
    content: IO[bytes],
    text_key: str,
    max_bytes: int,
    prompt_key: str | None,
) -> Iterator[Text | Damage]:
    for number, line in enumerate(_lines(piece, content, max_bytes)):
        if number == 0 and piece.start == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            if len(line) > max_bytes:
                raise DataError(TOO_LARGE.format(format_bytes(max_bytes)))
            record = json_object(line) if piece.kind == "jsonl" else None
            text = _field(record, text_key, "--text-key") if piece.kind == "jsonl" else _decode(line)
            prompt = _field(record, prompt_key, "--prompt-key") if prompt_key is not None else ""
        except DataError as error:
            problem = error.problems[0]
            yield Damage(_line_name(piece, number), problem.what, problem.fix)
        else:
            if text and prompt:
                yield Text(prompt, ends_document=False, learnt=False)
            if text:
                yield Text(text)


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the object of a JSONL line, or None for a blank line.

    Raises a DataError with the reason if the line is not a JSON object.
    """
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError includes UnicodeDecodeError
        spans_lines = line.lstrip()[:1] in (b"[", b"{") and line.rstrip()[-1:] in (b"[", b"{", b",")
        raise DataError(f"is not JSON: {error}{ARRAY_HINT if spans_lines else ''}") from error
    if not isinstance(record, dict):
        raise DataError(f"is a JSON {type(record).__name__}, not an object")
    return record


def _field(record: dict[str, Any] | None, text_key: str, flag: str) -> str:
    """Return the text of a JSONL record, or '' for a blank line.

    Raises a DataError with the reason if the record has no text.

    `flag` is the option that names the key.
    """
    if record is None:
        return ""
    if text_key not in record:
        fix = f"name the key of the text with {flag}; {suggest(text_key, list(record)[:20])}"
        raise DataError(f"has no key {text_key!r}", fix)
    return _usable(record[text_key], text_key)


def _usable(text: object, text_key: str) -> str:
    if not isinstance(text, str):
        raise DataError(f"{text_key!r} is {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{text_key!r} has an unpaired UTF-16 surrogate at character {error.start}") from error
    return text


def _decode(line: bytes) -> str:
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 at byte {error.start}: {error.reason}") from error
    return text if text.strip() else ""


def _read_whole(piece: InputPiece, content: IO[bytes]) -> Iterator[Text | Damage]:
    """Yield one document. A file above CHUNK_BYTES comes in several texts, and a chunk that is not UTF-8 is yielded as
    damage.
    """
    # the first chunk may begin with a byte order mark
    line = 1
    open_document = False
    encoding = "utf-8-sig"
    for chunk, last in _chunks(content):
        try:
            text = chunk.decode(encoding)
        except UnicodeDecodeError as error:
            damaged_line = line + error.object.count(b"\n", 0, error.start)
            why = "is UTF-16, not UTF-8" if chunk.startswith(UTF_16) else f"is not UTF-8: {error.reason}"
            yield Damage(f"{_name(piece)}:{damaged_line}", why)
        else:
            open_document = (open_document or bool(text)) and not last
            if text:
                yield Text(text, last)
        line = line + chunk.count(b"\n")
        encoding = "utf-8"
    if open_document:
        yield Text("", True)


def _chunks(content: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield pairs: a chunk of about CHUNK_BYTES of the content, and whether it is the last chunk.

    The content is cut at newlines, or between characters if a chunk has no newline.
    """
    held = b""
    while block := content.read(BLOCK_BYTES):
        held += block
        if len(held) >= CHUNK_BYTES:
            end = held.rfind(b"\n") + 1 or _character_end(held)
            yield held[:end], False
            held = held[end:]
    if held:
        yield held, True


def _character_end(data: bytes) -> int:
    """Return the end of the last complete UTF-8 character, for a chunk without a newline."""
    back = next((back for back in range(1, min(5, len(data))) if data[-back] & 0xC0 != 0x80), 1)
    return len(data) - back if data[-back] & 0x80 else len(data)


def _lines(piece: InputPiece, content: IO[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the lines whose first byte lies in the piece, newline included. A line longer than `max_bytes` is cut to
    `max_bytes` + 1 bytes.

    If such a line of a compressed file continues for PASSED_BYTES more bytes, the function reads no further. One packed
    megabyte can unpack to a gigabyte, which takes 3.4 CPU seconds.
    """
    if piece.start:
        content.seek(piece.start - 1)
        _end_line(content, b"")  # the line that began before this piece belongs to the previous piece
    unpacked = content.raw if isinstance(content, io.BufferedReader) and isinstance(content.raw, _Unpacked) else None
    while (unpacked or content.tell() < piece.stop) and (line := _line(content, max_bytes)):
        ends = len(line) <= max_bytes or _end_line(content, line, PASSED_BYTES if unpacked else None)
        yield line
        if unpacked and not ends:
            most = format_bytes(max_bytes + PASSED_BYTES)
            unpacked.damage = f"unpacks to one line of more than {most}, so the rest of the file is skipped"
            return


def _line(content: IO[bytes], max_bytes: int) -> bytes:
    """Return the next line, or its first `max_bytes` + 1 bytes.

    Unlike `readline` alone, this never holds two copies of a long line.
    """
    line = content.readline(min(BLOCK_BYTES, max_bytes + 1))
    if len(line) < BLOCK_BYTES or line.endswith(b"\n"):
        return line
    longer = io.BytesIO()
    longer.write(line)
    while (
        longer.tell() <= max_bytes
        and not line.endswith(b"\n")
        and (line := content.readline(min(BLOCK_BYTES, max_bytes + 1 - longer.tell())))
    ):
        longer.write(line)
    return longer.getvalue()


def _end_line(content: IO[bytes], line: bytes, most_bytes: int | None = None) -> bool:
    """Skip the rest of the line that begins with `line`. Return False if this rest has more than `most_bytes`."""
    passed = 0
    while not line.endswith(b"\n") and (line := content.readline(BLOCK_BYTES)):
        passed += len(line)
        if most_bytes is not None and passed > most_bytes:
            return False
    return True


def _name(piece: InputPiece) -> str:
    return without_secrets(piece.path)


def _line_name(piece: InputPiece, number: int) -> str:
    """Return the name of line `number` of the piece, for a message.

    In a remote file, lines are counted from the piece's first byte, because earlier bytes are not fetched.
    """
    if piece.start and isinstance(located(piece.path), RemoteFile):
        return f"{_name(piece)} (line {number + 1} after byte {piece.start})"
    return f"{_name(piece)}:{_lines_before(piece) + number + 1}"


@functools.lru_cache(maxsize=1)
def _lines_before(piece: InputPiece) -> int:
    """Return the number of lines that begin before the piece. Called only for damage, because it reads the file up to
    the piece.
    """
    if piece.start == 0:
        return 0
    count = 0
    left = piece.start
    with Path(piece.path).open("rb") as handle:
        while left > 0 and (block := handle.read(min(BLOCK_BYTES, left))):
            count += block.count(b"\n")
            left -= len(block)
        handle.seek(piece.start - 1)
        return count if handle.read(1) == b"\n" else count + 1


def _read_parquet(piece: InputPiece, text_key: str, max_bytes: int) -> Iterator[Text | Damage]:
    group = piece.start
    try:
        file = open_parquet(piece.path)
        columns = {file.schema.column(index).path: index for index in range(len(file.schema))}
        if text_key not in columns:
            nested = text_key in file.schema_arrow.names
            why = f"column {text_key!r} is nested, not a string" if nested else f"has no column {text_key!r}"
            names = suggest(text_key, [name for name in columns if "." not in name][:20])
            yield Damage(_name(piece), why, f"name the column of the text with --text-key; {names}")
            return
        row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
        for group in range(piece.start, piece.stop):
            described = file.metadata.row_group(group)
            page_bytes = largest_page_bytes(piece.path, described, columns[text_key])
            most_bytes = GROUP_OF_LARGEST * max_bytes
            text_bytes = 0
            if page_bytes > most_bytes:
                raise DataError(TOO_LARGE.format(format_bytes(most_bytes) + " in a page"))
            # Limit the values of a batch, because each value can be as long as the largest page.
            rows = max(1, min(1024, most_bytes // max(page_bytes, 1)))
            for batch in file.iter_batches(row_groups=[group], columns=[text_key], batch_size=rows):
                for value in batch.column(0).to_pylist():
                    try:
                        text = _usable(value, text_key)
                        if len(text) > max_bytes:
                            raise DataError(TOO_LARGE.format(format_bytes(max_bytes)))
                        text_bytes += len(text)
                    except DataError as error:
                        yield Damage(f"{_name(piece)} row {row}", error.problems[0].what)
                    else:
                        if text:
                            yield Text(text)
                    row += 1
                if text_bytes > most_bytes:
                    raise DataError(TOO_LARGE.format(format_bytes(most_bytes)))
    except DataError as error:
        yield Damage(f"{_name(piece)} (row group {group})", error.problems[0].what)
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        yield Damage(f"{_name(piece)} (row groups {group} to {piece.stop - 1})", f"cannot be read: {error}")


def _read_mds(piece: InputPiece, text_key: str, max_bytes: int) -> Iterator[Text | Damage]:
    """Yield a shard's texts. Samples after a damaged sample are not read."""
    try:
        yield from (Text(text) for text in mds.read_texts(piece.path, text_key, max_bytes) if text)
    except DataError as error:
        yield from (Damage(problem.where, f"{problem.what}; {problem.fix}") for problem in error.problems)
