"""Reads the small files of a run directory. A file with unexpected content raises an error that names the file.

A full disk, a restored backup or an editor can leave any content behind. Therefore the type of every value is checked
here.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from frontier_llm.errors import FrontierError

MAX_RECORD_BYTES = 1 << 20  # limit of a file with one JSON value; the largest in use is a list of 10,000 hosts.
MAX_LINE_BYTES = 1 << 20  # limit of a line of a JSON-lines file; a step's metrics have 2 KB.
LARGEST_COUNT = 2**53


class DamagedRecord(FrontierError):
    """A file of a run directory whose content this program cannot have written."""


def is_number(value: Any) -> bool:
    """True for a finite number. A boolean is not a number."""
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= 1e300


def is_count(value: Any) -> bool:
    """True for a whole number from 0 to 2^53. A boolean is not a number."""
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def open_record(path: Path) -> BinaryIO | None:
    """Open a regular file for reading. None if the name does not exist. Raises DamagedRecord if it is no such file."""
    if not os.path.lexists(path):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    except FileNotFoundError:
        raise DamagedRecord("is a link to a file that does not exist", "remove the link", str(path)) from None
    except OSError as error:
        raise DamagedRecord(
            f"cannot be read: {error.strerror}",
            "check its permissions and its disk",
            str(path),
        ) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "is a directory, not a file" if stat.S_ISDIR(mode) else "is not a regular file"
        raise DamagedRecord(what, "move it away", str(path))
    return os.fdopen(descriptor, "rb")


def read_text(path: Path) -> str | None:
    """Return the text of a small file. None if the file does not exist. Raises DamagedRecord."""
    file = open_record(path)
    if file is None:
        return None
    with file:
        try:
            content = file.read(MAX_RECORD_BYTES + 1)
        except OSError as error:
            raise DamagedRecord(f"cannot be read: {error.strerror}", "check its disk", str(path)) from None
    if len(content) > MAX_RECORD_BYTES:
        raise DamagedRecord(f"has more than {MAX_RECORD_BYTES} bytes", "move it away", str(path))
    try:
        return content.decode()
    except ValueError:
        raise DamagedRecord("is not UTF-8 text", "restore it from a copy, or move it away", str(path)) from None


def read_json(path: Path, expected: type, fix: str = "restore it from a copy, or move it away") -> Any:
    """Return the JSON value in a small file, which must have the type `expected` (dict or list).

    None if the file does not exist. Raises DamagedRecord.
    """
    text = read_text(path)
    if text is None:
        return None
    try:
        value = _parse(text)
    except (ValueError, RecursionError):
        what = "is empty" if not text.strip() else "is not JSON"
        raise DamagedRecord(what, fix, str(path)) from None
    if type(value) is not expected:
        wanted = "an object" if expected is dict else "a list"
        raise DamagedRecord(f"holds {_kind(value)}, expected {wanted}", fix, str(path))
    return value


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (line number, object) of a JSON-lines file. The object is None if the line holds no JSON object.

    A last line that a crash cut off is left out. Yields nothing if the file does not exist. Raises DamagedRecord.
    """
    file = open_record(path)
    if file is None:
        return
    with file:
        for number in itertools.count(1):
            try:
                line = file.readline(MAX_LINE_BYTES)
            except OSError as error:
                raise DamagedRecord(f"cannot be read: {error.strerror}", "check its disk", str(path)) from None
            if not line:
                return
            row = json_row(line)
            if row is not None or line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                yield number, row


def damaged_lines(path: Path, is_sound: Callable[[dict[str, Any]], bool]) -> str:
    """Return a text such as 'line 43 is damaged and ignored' if a JSON-lines file has damaged lines. '' otherwise.

    A line is damaged if it is not an object or `is_sound` is False for it. Raises DamagedRecord.
    """
    bad = [number for number, row in json_lines(path) if row is None or not is_sound(row)]
    if not bad:
        return ""
    if len(bad) == 1:
        return f"line {bad[0]} is damaged and ignored"
    return f"{len(bad)} lines are damaged and ignored, the first is line {bad[0]}"


def json_row(line: bytes) -> dict[str, Any] | None:
    """Return the object of one line. None if the line holds no JSON object."""
    try:
        value = _parse(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _parse(text: str | bytes) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")  # the package writes null instead of NaN and infinity


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return "text" if isinstance(value, str) else "a number"
