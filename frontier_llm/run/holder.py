"""Ensures that only one process uses a run directory. This process is called the holder of the directory.

The functions return the newest start of the run, the holder, and whether the holder is alive. They use three files:

* `incarnation.json`: number and job of the newest start, written by the supervisor.
* `submit.lock`: reserves the directory for a process that queues a job or writes job.json.
* `checkpoints/incarnations/NNNNNNNN.json`: lock of start N, taken by its rank 0 (checkpoint.lock). A later start can
  take its own lock only if this holder is dead.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frontier_llm import log
from frontier_llm.errors import FrontierError
from frontier_llm.files import write_atomically, write_durably
from frontier_llm.run.records import DamagedRecord, is_count, is_number, read_json
from frontier_llm.run.run_dir import queued_job
from frontier_llm.units import strict_json

# A holder on another host counts as dead after this time without a heartbeat. The time is twelve heartbeat intervals,
# and longer than the usual pause of a Lustre failover.
STALE_AFTER_S = 60.0
LOCKS = Path("checkpoints") / "incarnations"
RESERVATION = "submit.lock"
LAST_START = 99_999_999  # file names have eight digits
WATCH_PERIOD_S = 1.0


@dataclass(frozen=True)
class Holder:
    """The process that holds a run directory."""

    host: str
    pid: int
    process_start: str  # start time from /proc, which shows whether another process has reused the pid.
    job: str  # id from the scheduler, which stays the same after a requeue; '' outside of a job.
    restart: int  # number of times that Slurm had requeued this job.
    since: str
    released: bool = False

    def to_bytes(self) -> bytes:
        """Return the content of the lock file: one line of JSON."""
        return (strict_json(asdict(self), indent=None) + "\n").encode()

    def describe(self) -> str:
        """Return text such as 'job 4711 on n0 (pid 12, since 2026-11-20 22:31:00)'."""
        who = f"job {self.job} on {self.host}" if self.job else f"a process on {self.host}"
        return f"{who} (pid {self.pid}, since {self.since})"


def this_process(job: str = "", restart: int = 0) -> Holder:
    """Return a Holder that describes this process."""
    pid = os.getpid()
    return Holder(socket.gethostname(), pid, process_start(pid) or "", job, restart, time.strftime("%Y-%m-%d %H:%M:%S"))


def process_start(pid: int) -> str | None:
    """Return the start time of a live process in clock ticks since boot. None if it is dead or a zombie.

    '' on a system without /proc.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else ""
    except OSError:
        return None  # the process ended between open and read
    return None if fields[0] in "ZX" else fields[19]


def is_running(pid: int, start: str) -> bool:
    """Return whether the process with this pid is alive and is the one that started at `start` (see process_start).

    The start times are compared only if both are known. `start` is '' if it was written on a system without /proc. The
    mount options hidepid=1 and hidepid=2 of /proc hide the start times of other users' processes.
    """
    if pid < 1:
        return False  # os.kill would ask for groups of processes
    if start and os.access(f"/proc/{pid}/stat", os.R_OK):
        return process_start(pid) == start
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # a process of another user
    return True


def incarnations(folder: Path) -> list[int]:
    """Return the numbers of the starts that have a file in `folder`. Empty if the folder does not exist."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [int(entry.name[:8]) for entry in entries if re.fullmatch(r"[0-9]{8}\.json", entry.name)]


def start_after(folder: Path, newest: int, counted: int = 0) -> int:
    """Return the number of the next start. It is greater than `newest` and at least `counted`.

    `newest` is the highest number that has a lock file in `folder`.

    Raises FrontierError if a file has the number LAST_START, because no later start could get a higher number.
    """
    if newest >= LAST_START:
        what = f"records start number {newest} of the run, but the largest possible number is {LAST_START}"
        raise FrontierError(what, "if no job of this run is alive, delete the file", str(folder / f"{newest:08}.json"))
    if counted > LAST_START:
        what = f"counts {counted} starts of the run, but the largest possible number is {LAST_START}"
        raise FrontierError(
            what, "if no job of this run is alive, delete the file", str(folder.parent.parent / "incarnation.json")
        )
    return max(newest + 1, counted)


def read_holder(path: Path) -> Holder | None:
    """Return the holder in a file. None if the file is missing or damaged.

    Holders are written atomically, so only a disk fault can damage the file.
    """
    try:
        content = read_json(path, dict)
        holder = Holder(**(content or {}))
    except (DamagedRecord, TypeError):
        return None
    texts = (holder.host, holder.process_start, holder.job, holder.since)
    is_sound = all(isinstance(text, str) for text in texts) and is_count(holder.pid) and is_count(holder.restart)
    return holder if is_sound and isinstance(holder.released, bool) else None


def take(run_dir: Path, job_id: str, host: str) -> int:
    """Record a new start and return its number.

    Rank 0 of the start takes the checkpoint lock with this number. The lock keeps ranks of older starts from writing.
    """
    # The folder also has the starts without a supervisor, which incarnation.json does not count.
    folder = run_dir / LOCKS
    newest = max(incarnations(folder), default=0)
    number = start_after(folder, newest, last_start(run_dir).get("incarnation", 0) + 1)
    text = {"incarnation": number, "job_id": job_id, "host": host, "pid": os.getpid(), "since_unix_s": time.time()}
    write_atomically(run_dir / "incarnation.json", strict_json(text, indent=None) + "\n")
    return number


def last_start(run_dir: Path) -> dict[str, Any]:
    """Return the newest start that a supervisor has recorded. Empty for a new run.

    Keys: incarnation, job_id, host, pid, since_unix_s. Raises DamagedRecord for any other content.
    """
    path = run_dir / "incarnation.json"
    fix = f"if no job of this run is alive, delete this file: starts are also counted in {LOCKS}"
    content: dict[str, Any] | None = read_json(path, dict, fix)
    if content is None:
        return {}
    is_sound = {
        "incarnation": is_count(content.get("incarnation")),
        "job_id": isinstance(content.get("job_id"), str),
        "host": isinstance(content.get("host"), str),
        "since_unix_s": is_number(content.get("since_unix_s")),
    }
    wrong = [key for key, sound in is_sound.items() if not sound]
    if wrong:
        raise DamagedRecord(f"{wrong[0]} is {content.get(wrong[0])!r}", fix, str(path))
    return content


def jobs(run_dir: Path) -> list[str]:
    """Return the ids of the job that started last and of the job that was queued last. Missing ids are left out."""
    ids = (str(last_start(run_dir).get("job_id", "")), queued_job(run_dir))
    return list(dict.fromkeys(filter(None, ids)))


def living_holder(run_dir: Path) -> Holder | None:
    """Return the process that is training in a run directory now. None if there is none.

    A holder on another host counts as alive while its heartbeats are recent.
    """
    path = newest_lock(run_dir)
    holder = read_holder(path)
    if holder is None or holder.released:
        return None
    is_here = holder.host == socket.gethostname()
    alive = is_running(holder.pid, holder.process_start) if is_here else silence_s(path) <= STALE_AFTER_S
    return holder if alive else None


def newest_lock(run_dir: Path) -> Path:
    """Return the lock file of the newest start. The file may not exist."""
    folder = run_dir / LOCKS
    return folder / f"{max(incarnations(folder), default=0):08}.json"


def silence_s(path: Path) -> float:
    """Return the seconds since the last heartbeat of the holder, whose lock file is `path`.

    Negative if the clock of the holder's host is ahead of this host's clock.

    Raises OSError.
    """
    return time.time() - path.stat().st_mtime


def is_ahead(silent_s: float) -> bool:
    """Return True if the last heartbeat is so far in the future that the clock of one of the two hosts must be
    wrong.
    """
    return silent_s < -STALE_AFTER_S


def watched_dead(path: Path) -> bool:
    """Watch the heartbeats of a holder whose clock is wrong. Return True if no heartbeat arrives within STALE_AFTER_S.

    Takes up to 60 s.
    """
    before = path.stat().st_mtime_ns
    deadline_s = time.monotonic() + STALE_AFTER_S
    while time.monotonic() < deadline_s:
        time.sleep(WATCH_PERIOD_S)
        if path.stat().st_mtime_ns != before:
            return False
    return True


def how_to_free(path: Path) -> str:
    """Return advice for a user who knows that the holder is dead, although its file `path` counts as alive."""
    return f"if you know that the process is dead, delete {path}"


def refuse_second_start(run_dir: Path) -> None:
    """Raise FrontierError if a process is training in the directory.

    Must be called before a start replaces the logs and the record of the last failure.
    """
    holder = living_holder(run_dir)
    if holder is None:
        return
    path = newest_lock(run_dir)
    fix = f"wait until that process ends, or set another train.run_dir; {how_to_free(path)}"
    if holder.host == socket.gethostname():
        raise FrontierError(f"is in use by {holder.describe()}", fix, str(run_dir))
    silent_s = silence_s(path)
    if not is_ahead(silent_s):
        raise FrontierError(f"is in use by {holder.describe()}", fix, str(run_dir))
    log.warn(
        f"{path}: the last heartbeat of {holder.describe()} is {-silent_s:,.0f} s in the future; "
        f"waiting up to {STALE_AFTER_S:.0f} s for a new one"
    )
    if not watched_dead(path):
        raise FrontierError(
            f"is in use by {holder.describe()}, whose clock is {-silent_s:,.0f} s ahead", fix, str(run_dir)
        )


@contextlib.contextmanager
def reserved(run_dir: Path) -> Iterator[None]:
    """Reserve the directory while the body writes job.json or queues a job.

    Raises FrontierError if another living process holds the reservation, or if ranks without a job train there.
    """
    living = living_holder(run_dir)
    if living is not None and not living.job:  # if the holder has a job, the callers check the job's state in Slurm
        refuse_second_start(run_dir)
    path = run_dir / RESERVATION
    run_dir.mkdir(parents=True, exist_ok=True)
    own = this_process().to_bytes()
    try:
        write_durably(path, own)
    except FileExistsError:
        _refuse_reserved(run_dir, path)
        write_atomically(path, own)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _refuse_reserved(run_dir: Path, path: Path) -> None:
    """Raise FrontierError unless the process that reserved the directory is dead."""
    try:
        silent_s = silence_s(path)
    except FileNotFoundError:
        return  # the other process has just released the reservation
    holder = read_holder(path)
    if holder is None:
        alive = silent_s <= STALE_AFTER_S  # the other process may not have written the file yet
    elif holder.host == socket.gethostname():
        alive = is_running(holder.pid, holder.process_start)
    else:
        alive = silent_s <= STALE_AFTER_S
    if alive:
        who = holder.describe() if holder else "another process"
        raise FrontierError(
            f"is being submitted by {who}", f"wait until that process ends; {how_to_free(path)}", str(run_dir)
        )
