"""Sends notices of a run's events to its operator. The supervisor runs a command and calls a webhook on the batch host.

Notices cannot delay the supervisor: each one has its own thread and a time limit. A failed notice is only logged.
The address of a webhook is a secret. It comes from an environment variable or from a file that only its owner can read,
and is written to no record and no message.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.error import HTTPError

from frontier_llm import log
from frontier_llm.errors import FrontierError
from frontier_llm.run import run_dir
from frontier_llm.run.job import Job
from frontier_llm.run.rank_env import environ, environment
from frontier_llm.units import strict_json

WEBHOOK_VARIABLE = "FRONTIER_LLM_WEBHOOK"
LIMIT_S = 30.0  # time limit of one notice
POLL_S = 20.0  # time between two readings of metrics.jsonl while the ranks run
WATCHED = {"rewind": "rewind", "straggler": "straggler"}  # kind of a line of metrics.jsonl -> event


@dataclass(frozen=True)
class Notice:
    """One event of a run."""

    event: str  # end | given up | node lost | rewind | straggler
    text: str
    run_dir: str
    job_id: str
    step: int


def webhook_address(job: Job) -> str:
    """Return the address of the webhook. '' if there is none.

    Raises FrontierError if its file is missing or readable by others, or if it contains no address. The text of the
    error does not contain the address.
    """
    where = WEBHOOK_VARIABLE
    address = environ(WEBHOOK_VARIABLE) or ""
    if job.webhook_file:
        where = job.webhook_file
        address = _private_text(Path(job.webhook_file)).strip()
    if address and not address.startswith(("https://", "http://")):
        raise FrontierError("contains no address", "write https://…", where)
    return address


def _private_text(path: Path) -> str:
    """Return the text of a file that only this user can read."""
    fix = f"chmod 600 {path}"
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                mode = f"{stat.S_IMODE(status.st_mode):04o}"
                raise FrontierError(f"has mode {mode} and can be read by others, expected 0600", fix, str(path))
            return file.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise FrontierError(f"cannot be read: {reason}", fix, str(path)) from None


class Notifier:
    """Sends the notices of one job."""

    def __init__(self, job: Job, job_id: str, limit_s: float = LIMIT_S) -> None:
        """`limit_s` is the time limit of a notice, and of `close`."""
        self._job = job
        self._job_id = job_id
        self._limit_s = limit_s
        self._threads: list[threading.Thread] = []
        self._commands: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._lock = threading.Lock()  # held while a command is started or ended

    def send(self, event: str, text: str, step: int) -> None:
        """Send a notice in the background."""
        notice = Notice(event, text, self._job.run_dir, self._job_id, step)
        for deliver in (self._run_command, self._post):
            thread = threading.Thread(target=deliver, args=(notice,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Wait until all notices are sent, at most for the time limit. Commands that still run are then ended."""
        deadline_s = time.monotonic() + self._limit_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            self._closed = True
        for process in self._commands:
            self._end(process)

    def _run_command(self, notice: Notice) -> None:
        command = self._job.notice_command
        if not command:
            return
        variables = {f"FRONTIER_LLM_NOTICE_{name.upper()}": str(value) for name, value in asdict(notice).items()}
        with self._lock:
            if self._closed:
                log.warn(f"the notice command {command[0]} was not started in {self._limit_s:.0f} s")
                return
            try:
                process = subprocess.Popen(  # noqa: S603 a list
                    [*command, notice.event, notice.text],
                    env={**environment(), **variables},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                log.warn(f"the notice command {command[0]} does not start: {error.strerror}")
                return
            self._commands.append(process)
        try:
            code = process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            self._end(process)
            return
        if code > 0:
            log.warn(f"the notice command {command[0]} ended with {code}")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a command that still runs, and its children. `close` and the command's thread call this.

        The lock covers the message too, so that `close` returns after it.
        """
        with self._lock:
            if process.poll() is not None:
                return
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.warn(f"the notice command {self._job.notice_command[0]} was ended after {self._limit_s:.0f} s")

    def _post(self, notice: Notice) -> None:
        try:
            address = webhook_address(self._job)
            if not address:
                return
            content = strict_json({**asdict(notice), "text": f"{notice.event}: {notice.text}"}).encode()
            request = urllib.request.Request(  # noqa: S310 http and https only
                address, data=content, headers={"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=self._limit_s):  # noqa: S310
                pass
        except HTTPError as error:
            log.warn(f"the webhook answered {error.code}; the notice {notice.event!r} is lost")
        except FrontierError as error:
            log.warn(f"the webhook is not used: {error}")
        except (OSError, ValueError) as error:  # the error's text can contain the address
            log.warn(f"the webhook does not answer ({type(error).__name__}); the notice {notice.event!r} is lost")


class Watch:
    """Sends a notice for each line of metrics.jsonl that reports a rewind or a straggler while the ranks run."""

    def __init__(self, notifier: Notifier, directory: Path, poll_s: float = POLL_S) -> None:
        """Skip the present lines of metrics.jsonl; only later lines are reported."""
        self._notifier = notifier
        self._path = directory / "metrics.jsonl"
        self._poll_s = poll_s
        self._offset = self._path.stat().st_size if self._path.is_file() else 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Watch:
        """Start to watch."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Read the last lines, and stop watching."""
        self._ended.set()
        self._thread.join(self._poll_s)

    def _follow(self) -> None:
        while not self._ended.wait(self._poll_s):
            self._read()
        self._read()

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            with suppress(ValueError):
                self._report(json.loads(line))

    def _report(self, row: object) -> None:
        if not isinstance(row, dict) or row.get("kind") not in WATCHED or not run_dir.is_row(row):
            return
        event = WATCHED[row["kind"]]
        text = f"the run returned to step {row['step']}"
        if event == "straggler":
            text = f"{row['host'] or 'an unknown host'} is {row['slowdown']:.1f} times slower at step {row['step']}"
        self._notifier.send(event, text, row["step"])
