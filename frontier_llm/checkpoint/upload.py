"""Uploads the checkpoints of a running job to `train.remote`, in the background. Used on rank 0.

The checkpoints lie on a file system that all ranks share, so one process can read every shard. One uploader needs no
agreement between ranks, and the connection to the store is usually slower than one node's network.

A thread chooses the newest checkpoint that is kept and not uploaded yet, and starts a process for it
(`upload_process.py`). A checkpoint is never deleted while it is uploaded. If saves are faster than uploads, a
checkpoint that expires before its upload has begun is left out, so that the disk cannot fill up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from frontier_llm import log
from frontier_llm.checkpoint.remote_writer import claim, this_writer
from frontier_llm.checkpoint.upload_process import DAMAGED, TAKEN, UNREACHABLE, answer_of
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.run.complete import MANIFEST_DIGEST, step_name
from frontier_llm.run.uploads import UploadRecord, uploads_to, write_uploads

FIRST_PAUSE_S = 2.0  # pause after a failed upload, doubled after each further failure
LONGEST_PAUSE_S = 300.0
RELEASE_S = 10.0  # time limit for the last request to the object store


class Uploads:
    """Uploads of one run. All methods can be called from any thread."""

    def __init__(
        self, url: str, run_dir: Path, directory: Path, mib_per_s: float, kept: Callable[[], list[int]]
    ) -> None:
        """`kept` returns the steps of the complete checkpoints in `directory` that will not be deleted, newest first.

        Raises DamagedRecord or OSError if the run's record of uploads cannot be used.
        """
        self.url = url
        self._run_dir = run_dir
        self._directory = directory
        self._mib_per_s = mib_per_s
        self._kept = kept
        self._record = uploads_to(run_dir, url)
        self._writer = this_writer(self._record.writer, run_dir)
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._cancelled = threading.Event()
        self._current: int | None = None  # step that is being uploaded
        self._finished: dict[int, bytes] = {}  # step → manifest digest of uploaded and of damaged checkpoints
        self._is_claimed = False
        self._is_taken = False
        self._failures = 0
        self._thread: threading.Thread | None = None

    def claim(self) -> RemoteFolder:
        """Claim the URL for this run directory, and return its folder.

        If this method is not called, the first upload claims the URL.

        Raises TakenUrl if another run directory writes there, and UnreachableError.
        """
        place = RemoteFolder(self.url)
        claim(place, self._writer)
        self._is_claimed = True
        return place

    @property
    def discard_above(self) -> int | None:
        """Step above which the checkpoints at the URL do not belong to the run any more."""
        return self._record.discard_above

    def start(self) -> None:
        """Begin with the uploads. A second call has no effect."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether uploads are being made. False before `start`."""
        return self._thread is not None and self._thread.is_alive()

    def wake(self) -> None:
        """Look for new checkpoints now."""
        self._wake.set()

    @contextmanager
    def deleting(self, step: int) -> Iterator[bool]:
        """Context for deleting a checkpoint. Yields False if it is being uploaded and must not be deleted."""
        with self._lock:
            yield step != self._current

    def discard(self, step: int) -> None:
        """After a rewind, delete all remote checkpoints above `step`, also if the store answers only later."""
        with self._lock:
            above = step if self.discard_above is None else min(step, self.discard_above)
            self._finished = {done: digest for done, digest in self._finished.items() if done <= step}
            self._write(replace(self._record, discard_above=above))
            self._cancelled.set()
        self.wake()

    def pending(self) -> list[int]:
        """Return the steps that are to be uploaded, newest first."""
        with self._lock:
            if self._is_taken:
                return []
            return [step for step in self._kept() if self._finished.get(step) != self._digest(step)]

    def close(self) -> None:
        """End a running upload at once. A later start of the run continues it."""
        self._stopped.set()
        self.wake()
        if self._thread is None:
            return
        self._thread.join()
        waiting = self.pending()
        self._write(replace(self._record, pending=tuple(waiting)))
        if waiting:
            command = f"frontier-llm checkpoint push {self._run_dir} {self.url}"
            log.info(f"not uploaded yet: step {waiting[0]}; the next start continues, or run: {command}")
        self._stopped.clear()
        self._cancelled.clear()
        if not self._is_taken:
            self._run({"task": "release"}, RELEASE_S)

    def _digest(self, step: int) -> bytes:
        try:
            return (self._directory / step_name(step) / MANIFEST_DIGEST).read_bytes()
        except OSError:
            return b""

    def _work(self) -> None:
        while not self._stopped.is_set():
            digest = b""
            try:
                request = self._next()
                if request is None:
                    self._wake.wait()
                    self._wake.clear()
                    continue
                if self._current is not None:
                    digest = self._digest(self._current)
                problem = self._run(request)
            except OSError as error:  # the file system does not answer, or there is no memory for another process
                problem = {"kind": UNREACHABLE, "text": str(error)}
            with self._lock:
                self._record_result(digest, problem)
                self._current = None
            if problem is not None and not self._stopped.is_set():
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures - 1, 20))
                self._stopped.wait(pause_s if problem["kind"] == UNREACHABLE else 0.0)

    def _next(self) -> dict[str, Any] | None:
        """Choose the next request. None if there is nothing to do."""
        with self._lock:
            self._cancelled.clear()
            waiting = self.pending()
            self._write(replace(self._record, pending=tuple(waiting)))
            if self._is_taken:
                return None
            if self.discard_above is not None:
                return {"task": "discard", "step": self.discard_above}
            if not waiting:
                return None
            self._current = waiting[0]
            return {"task": "push", "checkpoint": str((self._directory / step_name(waiting[0])).absolute())}

    def _record_result(self, digest: bytes, problem: dict[str, str] | None) -> None:
        """Record the result of a request, for the next choice and for `status`."""
        if self._must_end():
            return
        step = self._current
        if problem is None:
            self._failures = 0
            self._is_claimed = True
            if step is None:
                self._write(replace(self._record, discard_above=None, problem=""))
                return
            self._finished[step] = digest
            log.info(f"uploaded {step_name(step)} to {self.url}")
            self._write(replace(self._record, uploaded_step=step, uploaded_unix_s=time.time(), problem=""))
            return
        self._failures += 1
        if self._failures == 1 or problem["kind"] != UNREACHABLE:
            log.warn(f"a checkpoint is not uploaded; training continues\n{problem['text']}")
        self._is_taken = problem["kind"] == TAKEN
        if problem["kind"] == DAMAGED and step is not None:
            self._finished[step] = digest
        self._write(replace(self._record, problem=problem["text"].splitlines()[0]))

    def _write(self, record: UploadRecord) -> None:
        if record == self._record:
            return
        self._record = record
        try:
            write_uploads(self._run_dir, record)
        except OSError as error:
            log.warn(f"cannot write the record of uploads: {error.strerror}")

    def _run(self, request: dict[str, Any], longest_s: float = float("inf")) -> dict[str, str] | None:
        """Run a request in a process of its own. Return its problem, or None after a success."""
        content = {
            **request,
            "url": self.url,
            "writer": self._writer.name,
            "is_claimed": self._is_claimed,
            "run_dir": str(self._run_dir.absolute()),
            "mib_per_s": self._mib_per_s,
        }
        return answer_of(content, self._must_end, longest_s)

    def _must_end(self) -> bool:
        return self._stopped.is_set() or self._cancelled.is_set()
