"""The file `writer.json` at a URL: the only run directory that may write checkpoints there.

Two runs that write to one URL would replace each other's checkpoints. A run directory therefore claims the URL before
its first upload, and checks its claim before and after the shards of every checkpoint.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from frontier_llm import log
from frontier_llm.config.urls import without_secrets
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.errors import CheckpointError
from frontier_llm.run.records import MAX_RECORD_BYTES, is_number
from frontier_llm.units import format_age, strict_json

WRITER = "writer.json"


class TakenUrl(CheckpointError):
    """Another run directory writes to this URL."""


@dataclass(frozen=True)
class Writer:
    """A run directory that writes to a URL."""

    name: str  # random; a copy of the run directory has the same name
    run_dir: str
    host: str
    renewed_unix_s: float
    is_released: bool = False  # True if its last job has ended in order

    def describe(self) -> str:
        """Return text such as 'runs/a on n0 (last upload 5 min ago)'."""
        return f"{self.run_dir} on {self.host} (last sign {format_age(time.time() - self.renewed_unix_s)})"


def this_writer(name: str, run_dir: Path) -> Writer:
    """Return a Writer that describes a run directory on this host."""
    return Writer(name, str(run_dir.absolute()), socket.gethostname(), time.time())


def read_writer(place: RemoteFolder) -> Writer | None:
    """Return the writer of a URL. None if there is none. Raises CheckpointError if the file is damaged."""
    content = place.read(WRITER, MAX_RECORD_BYTES)
    if content is None:
        return None
    try:
        writer = Writer(**json.loads(content))
        texts = (writer.name, writer.run_dir, writer.host)
        is_sound = all(isinstance(text, str) for text in texts) and is_number(writer.renewed_unix_s)
    except (ValueError, TypeError, RecursionError):
        is_sound = False
    if not is_sound:
        where = without_secrets(f"{place.url}/{WRITER}")
        raise CheckpointError("is not the record of a writer", "delete it if no other run writes there", where)
    return writer


def taken_by(place: RemoteFolder, mine: Writer) -> Writer | None:
    """Return the other run directory that writes to this URL. None if `mine` may write there."""
    writer = read_writer(place)
    # The same path under another name: the run directory was lost and made again.
    if writer is None or writer.is_released or writer.name == mine.name or writer.run_dir == mine.run_dir:
        return None
    return writer


def claim(place: RemoteFolder, mine: Writer, take_over: bool = False) -> None:
    """Make `mine` the writer of this URL. Raises TakenUrl if another run directory writes there.

    With `take_over` the other one loses the URL, and its next upload fails.
    """
    other = taken_by(place, mine)
    if other is not None and not take_over:
        raise taken(place, other, mine)
    if other is not None:
        log.info(f"{without_secrets(place.url)}: taking over from {other.describe()}")
    place.write(WRITER, _as_bytes(mine))


def check(place: RemoteFolder, mine: Writer) -> None:
    """Raise TakenUrl if another run directory has taken the URL since the claim."""
    writer = read_writer(place)
    if writer is not None and writer.name != mine.name:
        raise taken(place, writer, mine)


def renew(place: RemoteFolder, mine: Writer) -> None:
    """Record the time of this sign of `mine`. Raises TakenUrl if another run directory has taken the URL."""
    check(place, mine)
    place.write(WRITER, _as_bytes(mine))


def release(place: RemoteFolder, mine: Writer) -> None:
    """Record that `mine` does not write any more, so that another run directory may continue the run."""
    writer = read_writer(place)
    if writer is not None and writer.name == mine.name:
        place.write(WRITER, _as_bytes(replace(mine, is_released=True)))


def taken(place: RemoteFolder, other: Writer, mine: Writer) -> TakenUrl:
    """Return the error of a URL to which another run directory writes."""
    url = without_secrets(place.url)
    fix = (
        f"choose another URL; if that run has ended and {mine.run_dir} shall continue it: "
        f"frontier-llm checkpoint pull {url} {mine.run_dir} --take-over"
    )
    return TakenUrl(f"is written by {other.describe()}", fix, url)


def _as_bytes(writer: Writer) -> bytes:
    return (strict_json(asdict(writer)) + "\n").encode()
