"""Who holds a run directory: which start of the run is the newest, and whether its rank 0 lives.

incarnation.json                               a supervisor numbers each start of its ranks, and names the job
checkpoints/incarnations/NNNNNNNN.json         rank 0 takes the lock of its start (checkpoint.lock), which only a dead holder loses
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frontier_llm.cluster.run_dir import queued_job
from frontier_llm.errors import FrontierError
from frontier_llm.files import write_atomically
from frontier_llm.units import strict_json

# A holder on another host without a sign of life for so long is dead: twelve heartbeats, more than a usual Lustre failover pause
STALE_AFTER_S = 60.0
LOCKS = Path("checkpoints") / "incarnations"


@dataclass(frozen=True)
class Holder:
    """Who holds a run directory."""

    host: str
    pid: int
    process_start: str  # from /proc, so that a reused pid is not taken for the holder
    job: str  # of the scheduler; the same after a requeue; '' outside of any
    restart: int  # how often that job was requeued
    since: str
    released: bool = False

    def to_bytes(self) -> bytes:
        """The file's content."""
        return (strict_json(asdict(self), indent=None) + "\n").encode()

    def describe(self) -> str:
        """'job 4711 on n0 (pid 12, since 2026-11-20 22:31:00)'."""
        who = f"job {self.job} on {self.host}" if self.job else f"a process on {self.host}"
        return f"{who} (pid {self.pid}, since {self.since})"


def this_process(job: str = "", restart: int = 0) -> Holder:
    """The holder that this process would be."""
    pid = os.getpid()
    return Holder(socket.gethostname(), pid, process_start(pid) or "", job, restart, time.strftime("%Y-%m-%d %H:%M:%S"))


def process_start(pid: int) -> str | None:
    """Start time of a live process in clock ticks since boot ('' where there is no /proc); None when it is dead or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else ""
    except OSError:
        return None  # the process went away between open and read
    return None if fields[0] in "ZX" else fields[19]


def incarnations(folder: Path) -> list[int]:
    """The numbers of the starts that have left a file there; none where there is no such folder."""
    if not folder.is_dir():
        return []
    return [int(entry.name[:8]) for entry in os.scandir(folder) if re.fullmatch(r"[0-9]{8}\.json", entry.name)]


def read_holder(path: Path) -> Holder | None:
    """The holder in a file; None when it is gone or not one (nobody writes it in place, so then a disk lost it)."""
    try:
        with path.open("rb") as file:
            return Holder(**json.loads(file.read(4096)))
    except (OSError, ValueError, TypeError):
        return None


def take(run_dir: Path, job_id: str, host: str) -> int:
    """Record a new start and return its number, under which its ranks take the checkpoints' lock: that keeps an old rank from writing."""
    starts = [last_start(run_dir).get("incarnation", 0), *incarnations(run_dir / LOCKS)]  # also those without a supervisor
    text = {"incarnation": max(starts) + 1, "job_id": job_id, "host": host, "pid": os.getpid(), "since_unix_s": time.time()}
    write_atomically(run_dir / "incarnation.json", strict_json(text, indent=None) + "\n")
    return max(starts) + 1


def last_start(run_dir: Path) -> dict[str, Any]:
    """The newest start that a supervisor has recorded: incarnation, job_id, host, pid, since_unix_s; empty for a new run."""
    try:
        content = json.loads((run_dir / "incarnation.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return dict(content)


def jobs(run_dir: Path) -> list[str]:
    """Ids of the job that started last and of the one that was queued last, as far as there are any."""
    ids = (str(last_start(run_dir).get("job_id", "")), queued_job(run_dir))
    return list(dict.fromkeys(filter(None, ids)))


def living_holder(run_dir: Path) -> Holder | None:
    """Who is training in a run directory now; None when nobody is. A holder on another host lives as long as its heartbeats are recent."""
    folder = run_dir / LOCKS
    path = folder / f"{max(incarnations(folder), default=0):08}.json"
    holder = read_holder(path)
    if holder is None or holder.released:
        return None
    if holder.host == socket.gethostname():
        alive = process_start(holder.pid) == holder.process_start
    else:
        alive = time.time() - path.stat().st_mtime <= STALE_AFTER_S
    return holder if alive else None


def refuse_second_start(run_dir: Path) -> None:
    """Raises FrontierError when somebody trains there: looked at first, because a start replaces logs and the last failure's record."""
    if (holder := living_holder(run_dir)) is not None:
        raise FrontierError(f"is in use by {holder.describe()}", "wait until it ends, or give this run another train.run_dir", str(run_dir))
