"""Uploads the checkpoints of a running job to `train.remote`, in the background. Used on rank 0.

The checkpoints lie on a file system that all ranks share, so one process can read every shard. With one uploader the
ranks need not coordinate, and the connection to the store is usually slower than one node's network.

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
from frontier_llm.checkpoint.remote import uploaded_checkpoints
from frontier_llm.checkpoint.remote_writer import branched, claim, foreign_steps, this_writer
from frontier_llm.checkpoint.upload_process import DAMAGED, TAKEN, UNREACHABLE, answer_of
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.run.complete import MANIFEST_DIGEST, step_name
from frontier_llm.run.uploads import UploadRecord, after_discard, uploads_to, write_uploads

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
        self._replaced_above: int | None = None  # after the next save, steps at the URL above this step are deleted
        self._is_claimed = False
        self._is_taken = False
        self._failures = 0
        self._thread: threading.Thread | None = None

    def claim(self) -> list[int]:
        """Claim the URL for this run directory, and return the steps at the URL from which the run can continue.

        If this method is not called, the first upload claims the URL. An earlier start may have continued the run
        although it could not read the URL. If another run directory has later steps there, the run keeps its own steps.
        The result then lacks the other steps, and nothing is uploaded.

        Raises TakenUrl if another run directory writes there, and UnreachableError.
        """
        place = RemoteFolder(self.url)
        claim(place, self._writer)
        self._is_claimed = True
        above = self._record.discard_above
        steps = [one.step for one in uploaded_checkpoints(place) if above is None or one.step <= above]
        foreign = foreign_steps(steps, self._record.known_step)
        if foreign:
            self._is_taken = True
            problem = branched(self.url, foreign[0], self._record.branched_at, self._writer.run_dir)
            log.warn(f"continuing from the local checkpoints, and nothing is uploaded\n{problem}")
            self._write(replace(self._record, problem=problem.what))
            return [step for step in steps if step not in foreign]
        self._write(replace(self._record, branched_at=None))
        return steps

    def is_own(self, step: int) -> bool:
        """Return whether this run directory has uploaded a checkpoint of this or a later step."""
        return self._record.uploaded_step is not None and step <= self._record.uploaded_step

    def continued_at(self, step: int) -> None:
        """Record the step from which the run continues.

        If this run directory has uploaded later steps, they could not be loaded. They are deleted when the run has
        saved again, because the run then has another history. If the URL could not be read, that is recorded.
        """
        with self._lock:
            if not self._is_claimed and self._record.branched_at is None:
                self._write(replace(self._record, branched_at=step))
            if self.is_own(step + 1) and not self._is_taken:
                self._replaced_above = step

    def saved(self) -> None:
        """Look for checkpoints to upload, after a save."""
        replaced_above = self._replaced_above
        self._replaced_above = None
        if replaced_above is not None:
            log.warn(f"the checkpoints above step {replaced_above} at {self.url} are replaced by those of this start")
            self.discard(replaced_above)
        self.wake()

    def start(self) -> None:
        """Begin with the uploads. A second call has no effect."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True if uploads are being made. False before `start`."""
        return self._thread is not None and self._thread.is_alive()

    def wake(self) -> None:
        """Look for checkpoints to upload now."""
        self._wake.set()

    @contextmanager
    def deleting(self, step: int) -> Iterator[bool]:
        """Context for deleting a checkpoint. Yields False if it is being uploaded and must not be deleted."""
        with self._lock:
            yield step != self._current

    def discard(self, step: int) -> None:
        """After a rewind, delete all remote checkpoints above `step`. If the store does not respond, delete later."""
        with self._lock:
            before = self._record.discard_above
            above = step if before is None else min(step, before)
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
            request: dict[str, Any] | None = None
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
                self._record_result(request, digest, problem)
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
            if self._record.discard_above is None and not waiting:
                return None
            # The claim is a separate request, so that a later request that stalls does not claim again.
            if not self._is_claimed:
                return {
                    "task": "claim",
                    "known_step": self._record.known_step,
                    "branched_at": self._record.branched_at,
                }
            if self._record.discard_above is not None:
                return {"task": "discard", "step": self._record.discard_above}
            self._current = waiting[0]
            return {"task": "push", "checkpoint": str((self._directory / step_name(waiting[0])).absolute())}

    def _record_result(self, request: dict[str, Any] | None, digest: bytes, problem: dict[str, str] | None) -> None:
        """Record the result of a request, for the next choice and for `status`."""
        if self._must_end():
            return
        step = self._current
        if problem is None:
            self._failures = 0
            if request is not None and request["task"] == "claim":
                self._is_claimed = True
                self._write(replace(self._record, branched_at=None))
                return
            if step is None:
                self._write(after_discard(self._record))
                return
            self._finished[step] = digest
            log.info(f"uploaded {step_name(step)} to {self.url}")
            newest = max(step, self._record.uploaded_step or 0)  # older checkpoints are uploaded after newer ones
            self._write(replace(self._record, uploaded_step=newest, uploaded_unix_s=time.time(), problem=""))
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
        """Run a request in a separate process. Return the problem of the request, or None after a success."""
        content = {
            **request,
            "url": self.url,
            "writer": self._writer.name,
            "run_dir": str(self._run_dir.absolute()),
            "mib_per_s": self._mib_per_s,
        }
        return answer_of(content, self._must_end, longest_s)

    def _must_end(self) -> bool:
        return self._stopped.is_set() or self._cancelled.is_set()
