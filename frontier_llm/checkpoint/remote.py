"""Copies checkpoints to a URL and back. Does not import torch.

A remote checkpoint has the same files as a local one, so that every tool for object stores can copy it:

    URL/writer.json                             the run directory that writes here (remote_writer.py)
    URL/step_00000100/manifest.sha256           written first: states to which checkpoint the next files belong
    URL/step_00000100/shard_00000.safetensors   …
    URL/step_00000100/manifest.json             written last: the checkpoint is complete

A second push of the same checkpoint sends only files that are missing or have another size. If `manifest.sha256`
differs, the folder belongs to another checkpoint of this step and is deleted first.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import shard as shard_file
from frontier_llm.checkpoint.manifest import DamagedCheckpoint, Manifest, Shard, parse
from frontier_llm.checkpoint.remote_writer import Writer, check
from frontier_llm.config.urls import without_secrets
from frontier_llm.data.remote import UnreachableError
from frontier_llm.data.remote_folder import RemoteEntry, RemoteFolder
from frontier_llm.errors import UNREACHABLE, CheckpointError, Problem
from frontier_llm.files import created, lifted_bound, write_all
from frontier_llm.run.complete import MAX_MANIFEST_BYTES, digest_line, fault, named_step, step_name
from frontier_llm.run.threads import in_daemon

STALL_S = 600.0  # a transfer in which no byte moves for this time has failed
POLL_S = 0.2
# number of files that one process transfers at the same time; s3fs needs a buffer of 50 MiB for each file
FILES_AT_ONCE = 4
SENT_BYTES = 8 << 20  # bytes that are sent between two pauses of the rate limit.
# Function that is called with the number of bytes that were sent or received since the last call. The number is 0 after
# a local file was read and compared with its digest, and before a copy is committed. An error of the function ends the
# transfer.
OnBytes = Callable[[int], object]


class NotCopied(CheckpointError):
    """A checkpoint from which the run must continue cannot be copied now. A later start may succeed."""

    exit_code = 1
    cause = UNREACHABLE


class RemoteTransfer:
    """A request to a store in a daemon thread. It fails if no byte moves for STALL_S, also if the store's client hangs.

    The thread of a failed transfer may never end, so the process must then end with `os._exit`.
    """

    def __init__(self, work: Callable[[OnBytes], Any], url: str) -> None:
        """Start `work`. It receives a function as its argument, and calls this function to report its progress."""
        self._url = without_secrets(url)
        self._moved_s = time.monotonic()
        self._is_abandoned = False
        self._task = in_daemon(lambda: work(self._on_bytes), "remote")

    def _on_bytes(self, count: int) -> None:
        if self._is_abandoned:  # the run has continued without the copy, so the thread must not commit it
            raise self._stalled()
        self._moved_s = time.monotonic()

    def is_over(self) -> bool:
        """Wait for POLL_S. Return whether the transfer has ended or failed."""
        is_done = bool(wait([self._task], POLL_S).done)
        return is_done or time.monotonic() - self._moved_s > STALL_S

    def result(self) -> Any:
        """Return the result of the work, or raise its error. Raises UnreachableError if it has not ended."""
        if not self._task.done():
            self._is_abandoned = True
            raise self._stalled()
        return self._task.result()

    def _stalled(self) -> UnreachableError:
        what = f"sent nothing for {STALL_S:.0f} s"
        return UnreachableError(what, "check the store and the network, then try again", self._url)


class RateLimit:
    """Delays the threads of one process so that together they send at most a number of bytes per second."""

    def __init__(
        self,
        bytes_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`bytes_per_s` = 0 means no limit."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_s = clock()  # earliest time at which the rate limit allows the next bytes
        self._lock = threading.Lock()

    def spend(self, count: int) -> None:
        """Wait until `count` more bytes may be sent."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = self._clock()
            begin_s = max(now_s, self._free_s)
            self._free_s = begin_s + count / self._bytes_per_s
        self._sleep(begin_s - now_s)


class RemoteCheckpoint:
    """One checkpoint at a URL, which may be incomplete."""

    def __init__(self, place: RemoteFolder, step: int) -> None:
        self.step = step
        self.place = place.below(step_name(step))
        self.name = step_name(step)

    def __str__(self) -> str:
        return without_secrets(self.place.url)

    def entries(self) -> dict[str, RemoteEntry]:
        """Return the files of the checkpoint. Empty if it does not exist."""
        return self.place.entries()

    def size_bytes(self) -> int:
        """Return the sum of the sizes of all files."""
        return sum(entry.size_bytes for entry in self.entries().values())

    def is_uploaded(self) -> bool:
        """Return whether the upload has ended: the manifest, which is uploaded last, exists."""
        return folder.MANIFEST in self.entries()

    def read_manifest(self) -> tuple[Manifest, bytes]:
        """Return the manifest and its bytes.

        Raises DamagedCheckpoint if the upload has not ended, if the manifest does not match its digest, or if a file
        is missing or has another size.
        """
        entries = self.entries()
        where = f"{self}/{folder.MANIFEST}"
        content = self._read(folder.MANIFEST, entries)
        if self._read(folder.MANIFEST_DIGEST, entries) != digest_line(content):
            raise DamagedCheckpoint(f"does not match {folder.MANIFEST_DIGEST}", where=where)
        manifest = parse(content, where)
        if manifest.progress.step != self.step:
            raise DamagedCheckpoint(f"is of step {manifest.progress.step}, not of step {self.step}", where=where)
        for name in self.missing(manifest, entries):
            raise DamagedCheckpoint("is missing, or has another size than in the manifest", where=f"{self}/{name}")
        return manifest, content

    def _read(self, name: str, entries: dict[str, RemoteEntry]) -> bytes:
        if name not in entries:
            fix = "frontier-llm checkpoint push, from the run directory that has this checkpoint"
            raise DamagedCheckpoint("is not uploaded completely", fix, f"{self}/{name}")
        limit = lifted_bound(MAX_MANIFEST_BYTES)
        content = self.place.read(name, limit)
        if content is None or len(content) > limit:
            raise DamagedCheckpoint(f"cannot be read, or has more than {limit} bytes", where=f"{self}/{name}")
        return content

    def missing(self, manifest: Manifest, entries: dict[str, RemoteEntry]) -> list[str]:
        """Return the names of shards that are missing at the URL, or have another size there."""
        sizes = {name: entry.size_bytes for name, entry in entries.items() if not entry.is_folder}
        return [entry.file for entry in manifest.shards if sizes.get(entry.file) != entry.bytes]

    def is_copy_of(self, content: bytes) -> bool:
        """Return whether the files at the URL belong to the checkpoint with this manifest."""
        return self.place.read(folder.MANIFEST_DIGEST, len(content)) == digest_line(content)

    def read_shard(self, manifest: Manifest, entry: Shard, consume: Callable[[bytes], object]) -> None:
        """Read a shard, check its digest, and pass its bytes to `consume`. Raises DamagedCheckpoint."""
        with self.place.file(entry.file, entry.bytes).open() as stream:
            shard_file.verify_stream(stream, f"{self}/{entry.file}", manifest, entry, consume)

    def delete(self) -> None:
        """Delete all files. The manifest is deleted first, so that a partly deleted checkpoint is not complete."""
        self.place.delete_file(folder.MANIFEST)
        self.place.delete()


def remote_checkpoints(place: RemoteFolder) -> list[RemoteCheckpoint]:
    """Return all checkpoints in a remote folder, newest first. Uploads that have not ended are included."""
    names = (name for name, entry in place.entries().items() if entry.is_folder)
    steps = (named_step(name) for name in names)
    return [
        RemoteCheckpoint(place, step) for step in sorted((step for step in steps if step is not None), reverse=True)
    ]


def uploaded_checkpoints(place: RemoteFolder) -> Iterator[RemoteCheckpoint]:
    """Yield the checkpoints whose upload has ended, newest first."""
    return (one for one in remote_checkpoints(place) if one.is_uploaded())


def delete_above(place: RemoteFolder, step: int, on_deleted: Callable[[], object] = lambda: None) -> None:
    """Delete all remote checkpoints above `step`."""
    for one in remote_checkpoints(place):
        if one.step > step:
            one.delete()
            on_deleted()


def at_url(url: str) -> list[RemoteCheckpoint]:
    """Return the checkpoints at the URL of a run or of one checkpoint, oldest first.

    Raises CheckpointError if there is none.
    """
    base, _, name = url.rstrip("/").rpartition("/")
    step = named_step(name)
    if step is not None:
        one = RemoteCheckpoint(RemoteFolder(base), step)
        found = [one] if one.entries() else []
    else:
        found = remote_checkpoints(RemoteFolder(url))[::-1]
    if not found:
        fix = "give the URL of a run's checkpoints, or of one step_… folder"
        raise CheckpointError("contains no checkpoint", fix, without_secrets(url))
    return found


@dataclass(frozen=True)
class Pushed:
    """Result of a push."""

    step: int
    sent_files: int
    sent_bytes: int
    kept_files: int  # number of shards that the URL had already


def push(
    path: Path, place: RemoteFolder, writer: Writer, limit: RateLimit, on_bytes: OnBytes = lambda count: None
) -> Pushed:
    """Copy the checkpoint `path` to a URL that `writer` has claimed. Each shard is compared with its digest first.

    Raises DamagedCheckpoint if a local file is damaged, UnreachableError, or TakenUrl.
    """
    if (problem := fault(path)) is not None:
        raise DamagedCheckpoint(problem)
    manifest, content = folder.read_manifest(path)
    there = RemoteCheckpoint(place, manifest.progress.step)
    check(place, writer)
    entries = there.entries()
    if entries and not there.is_copy_of(content):
        there.delete()
        entries = {}
    if not entries:
        there.place.write(folder.MANIFEST_DIGEST, digest_line(content))
    names = there.missing(manifest, entries)
    shards = [entry for entry in manifest.shards if entry.file in set(names)]
    stored = entries.get(folder.MANIFEST)
    if not shards and stored is not None and stored.size_bytes == len(content):
        return Pushed(manifest.progress.step, 0, 0, len(manifest.shards))

    def send(number: int) -> None:
        entry = shards[number]
        shard_file.verify(path / entry.file, manifest, entry, consume=lambda *_: on_bytes(0))
        with (path / entry.file).open("rb") as file, there.place.created(entry.file) as write:
            while block := file.read(SENT_BYTES):
                limit.spend(len(block))
                write(block)
                on_bytes(len(block))

    shard_file.on_threads(send, len(shards), FILES_AT_ONCE)
    if missing := there.missing(manifest, there.entries()):
        raise UnreachableError(
            "has not arrived in its full size", "push again; complete files are kept", f"{there}/{missing[0]}"
        )
    check(place, writer)
    there.place.write(folder.MANIFEST, content)
    return Pushed(
        step=manifest.progress.step,
        sent_files=len(shards),
        sent_bytes=sum(entry.bytes for entry in shards),
        kept_files=len(manifest.shards) - len(shards),
    )


def pull(
    source: RemoteCheckpoint,
    directory: Path,
    on_bytes: OnBytes = lambda count: None,
    before_commit: Callable[[], object] = lambda: None,
) -> Path:
    """Copy a remote checkpoint into a `checkpoints` folder, check every digest, and rename it to its place.

    A local checkpoint of this step is replaced. Raises DamagedCheckpoint if the remote files are damaged,
    CheckpointError if the local files cannot be written, UnreachableError, and the errors of `before_commit`. After an
    error no part of the copy is left in the folder.
    """
    manifest, content = source.read_manifest()
    needed_bytes = manifest.total_bytes + len(content)
    # A random name for the unfinished copy: the thread of an abandoned transfer must not touch a save of the same step.
    copy_number = secrets.randbelow(2**63)
    try:
        with folder.writing(directory, needed_bytes):
            directory.mkdir(parents=True, exist_ok=True)
            building = folder.begin(directory, source.step, copy_number, needed_bytes)

            def receive(number: int) -> None:
                entry = manifest.shards[number]
                with created(building / entry.file) as descriptor:
                    written_bytes = 0

                    def keep(block: bytes) -> None:
                        nonlocal written_bytes
                        write_all(descriptor, memoryview(block), written_bytes)
                        written_bytes += len(block)
                        on_bytes(len(block))

                    source.read_shard(manifest, entry, keep)

            shard_file.on_threads(receive, len(manifest.shards), FILES_AT_ONCE)
            before_commit()
            on_bytes(0)
            return folder.commit(directory, manifest, content, copy_number)
    except BaseException:
        shutil.rmtree(folder.temporary(directory, source.step, copy_number), ignore_errors=True)
        raise


def verify(source: RemoteCheckpoint, progress: Callable[[int, int], None] = lambda done, of: None) -> list[Problem]:
    """Return all damage of a remote checkpoint, as `inspect.verify` does. Reads every byte."""
    try:
        manifest, _ = source.read_manifest()
    except DamagedCheckpoint as error:
        return list(error.problems)
    problems: list[Problem] = []
    for number, entry in enumerate(manifest.shards, start=1):
        try:
            source.read_shard(manifest, entry, lambda block: None)
        except DamagedCheckpoint as error:
            problems += error.problems
        progress(number, len(manifest.shards))
    return problems


def summary(source: RemoteCheckpoint) -> dict[str, Any]:
    """Return the values of a remote checkpoint in a line of `checkpoint list`. Raises DamagedCheckpoint."""
    manifest, _ = source.read_manifest()
    return {
        "path": str(source),
        **manifest.summary(),
        "written_unix_s": source.entries()[folder.MANIFEST].changed_unix_s,
        "latest": False,
        "best": manifest.progress.is_best,
    }
