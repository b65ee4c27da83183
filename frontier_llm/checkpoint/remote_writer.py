"""The file `writer.json` at a URL names the only run directory that may write checkpoints to this URL.

Two runs that write to one URL would replace each other's checkpoints. The rule:

* A run directory is identified by its path and by the random name in its `remote.json`. A copy of a run directory has
  another path, and a directory of another machine with the same path has another name.
* A start may `claim` the URL if there is no claim, if the claim is its own, or if the claim was released. The last job
  of a run directory releases the claim when it ends without an error.
* A claim never expires by time, because a job may wait in the queue for days. If a run directory ended without a
  release, the user takes over: `frontier-llm checkpoint pull URL RUN_DIR --take-over`.
* A process that has claimed the URL may write while the claim names its run directory (`check`). It never writes again
  if the claim names another run directory, even if that claim was released: that directory may have written
  checkpoints.

Object stores have no atomic compare-and-swap. Two claims at the same time can therefore both succeed. The record of the
later write remains, and the check before a manifest is written stops the other run.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from frontier_llm import log
from frontier_llm.config.urls import without_secrets
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.errors import CheckpointError, Problem
from frontier_llm.run.records import MAX_RECORD_BYTES, is_number
from frontier_llm.units import format_age, strict_json

WRITER = "writer.json"


class TakenUrl(CheckpointError):
    """Another run directory writes to this URL."""


@dataclass(frozen=True)
class Writer:
    """A run directory that writes to a URL."""

    name: str  # random, from the run directory's remote.json
    run_dir: str  # absolute path
    host: str
    renewed_unix_s: float
    is_released: bool = False  # True if the last job of this run directory has ended without an error

    def describe(self) -> str:
        """Return text such as '/scratch/a on n0 (last sign 5 min ago)'."""
        return f"{self.run_dir} on {self.host} (last sign {format_age(time.time() - self.renewed_unix_s)})"

    def is_same(self, other: Writer) -> bool:
        """Return whether this object and `other` describe the same run directory."""
        return self.name == other.name and self.run_dir == other.run_dir


def this_writer(name: str, run_dir: Path) -> Writer:
    """Return a Writer that describes a run directory on this host."""
    return Writer(name, str(run_dir.resolve()), socket.gethostname(), time.time())


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
    """Return the other run directory that writes to this URL. None if `mine` may claim it."""
    writer = read_writer(place)
    if writer is None or writer.is_released or writer.is_same(mine):
        return None
    return writer


def claim(place: RemoteFolder, mine: Writer, take_over: bool = False) -> None:
    """Make `mine` the writer of this URL. Raises TakenUrl if another run directory writes there.

    With `take_over` the other run directory loses the URL, and its next upload fails.
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
    if writer is not None and not writer.is_same(mine):
        raise taken(place, writer, mine)


def foreign_steps(steps: Iterable[int], known_step: int | None) -> list[int]:
    """Return the steps at a URL that a run did not know when it continued without reading the URL, newest first.

    `known_step` is the last step that the run knows to be its own. It is None if the run has read the URL.
    """
    return [] if known_step is None else sorted((step for step in steps if step > known_step), reverse=True)


def refuse_foreign(
    place: RemoteFolder, steps: Iterable[int], mine: Writer, known_step: int | None, branched_at: int | None
) -> None:
    """Raise TakenUrl if another run directory has written one of the `steps` at the URL (see `foreign_steps`)."""
    if foreign := foreign_steps(steps, known_step):
        raise TakenUrl(branched(place.url, foreign[0], branched_at, mine.run_dir))


def branched(url: str, step: int, branched_at: int | None, run_dir: str) -> Problem:
    """Return a Problem if the URL has a step of another run directory that is later than the last step known to the
    run.
    """
    url = without_secrets(url)
    what = (
        f"has step {step} of another run directory, and this run continued from step {branched_at} when the store "
        f"could not be reached, so that the run has two histories"
    )
    fix = (
        f"to continue from step {step}: frontier-llm checkpoint pull {url} {run_dir} --take-over; to keep the steps of "
        f"this run directory: another train.remote"
    )
    return Problem(url, what, fix)


def renew(place: RemoteFolder, mine: Writer) -> None:
    """Write the record of the run directory `mine` again, with the present time.

    Raises TakenUrl if another run directory has taken the URL.
    """
    check(place, mine)
    place.write(WRITER, _as_bytes(mine))


def release(place: RemoteFolder, mine: Writer) -> None:
    """Record that `mine` does not write any more, so that another run directory may continue the run."""
    writer = read_writer(place)
    if writer is not None and writer.is_same(mine):
        place.write(WRITER, _as_bytes(replace(mine, is_released=True)))


def taken(place: RemoteFolder, other: Writer, mine: Writer) -> TakenUrl:
    """Return the error for a URL to which another run directory writes."""
    url = without_secrets(place.url)
    fix = (
        f"choose another URL; if that run has ended and {mine.run_dir} shall continue it: "
        f"frontier-llm checkpoint pull {url} {mine.run_dir} --take-over"
    )
    return TakenUrl(f"is written by {other.describe()}", fix, url)


def _as_bytes(writer: Writer) -> bytes:
    return (strict_json(asdict(writer)) + "\n").encode()
