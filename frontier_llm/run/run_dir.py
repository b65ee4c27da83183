"""Reads and writes the files of a run directory. Does not import torch.

* `checkpoints/step_NNNNNNNN/`: `complete.py` decides which one is the newest complete checkpoint.
* `metrics.jsonl`: one line per training step, evaluation, test of in-context tasks, save, start, and rewind (return to
  an older checkpoint). Lines of starts and rewinds contain the layout.
* `attempts.jsonl`: one line per start of the ranks: nodes, steps and how the start ended.
* `incarnation.json`: the newest start and its job (`holder.py`).
* `bad_nodes.json`: hosts that failed. The next submission excludes them. They are used only if no other host is left.
* `successor`: id of the job that was queued last.
* `untrusted_nodes.json`: hosts that computed wrong results or differed from the others at a start. They are never used
  again until the file is deleted.
* `remote.json`: the copies of checkpoints at `train.remote` (`uploads.py`).
* `evaluations/`: results of `evaluate --follow`, one file per checkpoint (`evaluations.py`).
* `STOP`: made by a user. The run saves, ends, and is not continued until the file is deleted.
* `SAVE`: made by a user. The run saves within a step, continues, and deletes the file.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from frontier_llm.errors import FrontierError
from frontier_llm.files import folder_below, open_below, write_atomically
from frontier_llm.run.complete import newest_complete
from frontier_llm.run.records import (
    MAX_LINE_BYTES,
    DamagedRecord,
    is_count,
    is_number,
    json_lines,
    read_json,
    read_text,
)
from frontier_llm.units import strict_json

STOP_FILE = "STOP"
SAVE_FILE = "SAVE"
DECISIONS_FILE = "decisions.jsonl"
SWITCH = "switch plan"  # action of a line of decisions.jsonl
MOVED = "was moved or deleted during the run; nothing is written at its old path"
MOVE_BACK = "move it back, or start the run again at its new path"
# optional numbers in a row of metrics.jsonl
NUMBERS = ("loss", "gradient_norm", "tokens_per_s", "step_time_s", "consumed_tokens")
# Values that can be NaN or infinite, for which the file has null. A null `mfu` means that the value is unknown.
NOT_ALWAYS_FINITE = ("loss", "gradient_norm", "perplexity", "bits_per_byte")


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks, and the way in which it ended."""

    incarnation: int
    job_id: str
    nodes: tuple[str, ...]
    start_step: int
    end_step: int
    exit_code: int
    cause: str  # finished | interrupted, or the cause of a failure (failure.Failure.cause)
    detail: str = ""
    failed_host: str = ""  # host of the failure; set only if the host's hardware may be the cause
    started_unix_s: float = 0.0
    ended_unix_s: float = field(default_factory=time.time)
    last_step: int | None = None  # last finished step, saved or not. None: not recorded.
    fault: str = ""  # error text of the program (failure.Failure.program_fault)
    plan: tuple[str, ...] = ()  # overrides that selected the layout (job.Job.plans); (): the layout of the run file

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Attempt:
        """Return the attempt of a row of attempts.jsonl. `is_attempt(row)` must be True."""
        known = cls.__dataclass_fields__.keys() & row.keys()
        lists = {"nodes": tuple(row["nodes"]), "plan": tuple(row.get("plan", ()))}
        return cls(**{**{key: row[key] for key in known}, **lists})

    @property
    def failed(self) -> bool:
        """True if the start neither finished nor was interrupted on request."""
        return self.cause not in ("finished", "interrupted")

    @property
    def is_failed_start(self) -> bool:
        """True if the start failed before it finished a step. False if the number of its steps is not recorded."""
        return self.failed and self.last_step is not None and self.last_step <= self.start_step

    @property
    def node_hours(self) -> float:
        """Node-hours that the ranks used."""
        return len(self.nodes) * max(0.0, self.ended_unix_s - self.started_unix_s) / 3600


@dataclass(frozen=True)
class PlanSwitch:
    """The change of a run from its own plan to its roomier plan, which needs less memory (job.Job.plans)."""

    step: int  # step of the newest checkpoint at the change
    plan: tuple[str, ...]  # overrides of the roomier plan
    reason: str


class Moved(FrontierError):
    """The run directory is no longer at the path that it had when the launcher started."""


def place(run_dir: Path) -> tuple[int, int]:
    """Return (device, inode) of the run directory, for `refuse_moved`. Raises Moved if the directory does not exist."""
    try:
        status = run_dir.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise Moved(MOVED, MOVE_BACK, str(run_dir)) from None
    return status.st_dev, status.st_ino


def refuse_moved(run_dir: Path, before: tuple[int, int]) -> None:
    """Raise Moved if the run directory was renamed, deleted or replaced since `place` returned `before`.

    A record that is written to the old path would begin another run.
    """
    if place(run_dir) != before:
        raise Moved(MOVED, MOVE_BACK, str(run_dir))


def share_with_group(run_dir: Path) -> bool:
    """Let the group write the files that this process and its children make, if it may write the run directory.

    Another member of the group can then continue the run. Returns whether the group may write the run directory.
    """
    try:
        is_shared = bool(run_dir.stat().st_mode & stat.S_IWGRP)
    except OSError:
        return False
    if is_shared:
        mask = os.umask(0)
        os.umask(mask & ~stat.S_IRWXG)
    return is_shared


def open_lines(path: Path) -> FileIO:
    """Open a file for appending complete lines. Cut off a partial last line that a crash or a full disk has left.

    Raises FrontierError for a link.
    """
    lines = FileIO(open_below(path.parent, path.name, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+")
    lines.truncate(end_of_lines(lines))
    return lines


def end_of_lines(file: FileIO) -> int:
    """Return the number of bytes up to the end of the last complete line."""
    size = os.fstat(file.fileno()).st_size
    start = max(0, size - MAX_LINE_BYTES)
    file.seek(start)
    return start + file.read().rfind(b"\n") + 1


def make_log_dir(log_dir: Path, run_dir: Path | None) -> None:
    """Create the folder of the ranks' logs.

    Raises FrontierError if the folder lies below the run directory and a link is on the path.
    """
    if run_dir is not None and log_dir.is_relative_to(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        folder_below(run_dir, str(log_dir.relative_to(run_dir)))
    else:
        log_dir.mkdir(parents=True, exist_ok=True)


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one line and flush it to the device."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lines(path) as lines:
        lines.write((strict_json(row, indent=None) + "\n").encode())
        os.fsync(lines.fileno())


def latest_step(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint. 0 if there is none.

    Raises DamagedRecord if the folder cannot be read.
    """
    folder = run_dir / "checkpoints"
    try:
        return newest_complete(folder) or 0
    except OSError as error:
        raise DamagedRecord(
            f"cannot be read: {error.strerror}", "check its permissions and its disk", str(folder)
        ) from None


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Return the objects of a JSON-lines file. Lines without an object are left out.

    Raises DamagedRecord if the path is not a regular file.
    """
    return (row for _, row in json_lines(path) if row is not None)


def is_row(row: Mapping[str, Any]) -> bool:
    """Return True if a row of metrics.jsonl has the types that this program writes."""
    if not is_count(row.get("step")) or not isinstance(row.get("kind", "step"), str):
        return False
    return all(row.get(key) is None or is_number(row[key]) for key in NUMBERS) and (
        row.get("kind") != "straggler" or (isinstance(row.get("host"), str) and is_number(row.get("slowdown")))
    )


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the valid rows of metrics.jsonl.

    After a start or a rewind at step N, the run repeats all later steps. The earlier rows of these steps are left out.
    """
    valid: list[dict[str, Any]] = []
    for row in read_jsonl(run_dir / "metrics.jsonl"):
        if not is_row(row):
            continue
        if row.get("kind") in ("start", "rewind"):
            valid = [earlier for earlier in valid if earlier["step"] <= row["step"]]
        valid.append(row)
    return valid


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the training rows, one per step, in ascending order of steps."""
    by_step = {
        row["step"]: _numbers(row) for row in rows(run_dir) if row.get("kind", "step") == "step" and "loss" in row
    }
    return [by_step[step] for step in sorted(by_step)]


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Replace null by NaN for values that can be non-finite."""

    def is_number(key: str) -> bool:
        return key in NOT_ALWAYS_FINITE or key.startswith("validation/")

    return {key: math.nan if value is None and is_number(key) else value for key, value in row.items()}


def last_logged_step(run_dir: Path, incarnation: int) -> int:
    """Return the last step that the start with this number logged in metrics.jsonl. 0 if there is none."""
    logged = (
        row["step"]
        for row in read_jsonl(run_dir / "metrics.jsonl")
        if is_row(row) and row.get("kind") == "step" and row.get("incarnation") == incarnation
    )
    return max(logged, default=0)


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of validation losses, one per evaluated step, in ascending order of steps."""
    by_step = {row["step"]: _numbers(row) for row in rows(run_dir) if row.get("kind") == "evaluation"}
    return [by_step[step] for step in sorted(by_step)]


def tasks(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of accuracies on in-context tasks, one per step, in ascending order of steps."""
    by_step = {
        row["step"]: row
        for row in rows(run_dir)
        if row.get("kind") == "tasks" and isinstance(row.get("accuracy"), dict)
    }
    return [by_step[step] for step in sorted(by_step)]


def layouts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of starts and rewinds at which the `layout` of the run changed.

    Returns an empty list if metrics.jsonl was written before the layout was recorded.
    """
    changes: list[dict[str, Any]] = []
    for row in rows(run_dir):
        if isinstance(row.get("layout"), dict):
            # delete plan changes after which no step was trained
            changes = [change for change in changes if change["step"] < row["step"]]
            if not changes or changes[-1]["layout"] != row["layout"]:
                changes.append(row)
    return changes


def attempts(run_dir: Path) -> list[Attempt]:
    """Return every recorded start, oldest first. Raises DamagedRecord if attempts.jsonl is not a regular file."""
    return [Attempt.of(row) for row in read_jsonl(run_dir / "attempts.jsonl") if is_attempt(row)]


def is_attempt(row: Mapping[str, Any]) -> bool:
    """Return True if a row of attempts.jsonl has the types that this program writes."""
    counts = ("incarnation", "start_step", "end_step")
    texts = ("job_id", "cause", "detail", "failed_host")
    times = ("started_unix_s", "ended_unix_s")
    return (
        all(is_count(row.get(key)) for key in counts)
        and type(row.get("exit_code")) is int
        and all(isinstance(row.get(key), str) for key in texts)
        and all(is_number(row.get(key)) for key in times)
        and _is_list_of_text(row.get("nodes"))
        and _is_list_of_text(row.get("plan", []))
        and (row.get("last_step") is None or is_count(row["last_step"]))
        and isinstance(row.get("fault", ""), str)
    )


def last_attempt(run_dir: Path) -> Attempt | None:
    """Return the newest recorded start. None if no start has ended yet."""
    return next(reversed(attempts(run_dir)), None)


def plan_switches(run_dir: Path) -> list[PlanSwitch]:
    """Return the changes to a roomier plan that decisions.jsonl records, oldest first."""
    rows = (row for row in read_jsonl(run_dir / DECISIONS_FILE) if row.get("action") == SWITCH)
    return [
        PlanSwitch(row["step"], tuple(row["plan"]), row["reason"])
        for row in rows
        if is_count(row.get("step")) and _is_list_of_text(row.get("plan")) and isinstance(row.get("reason"), str)
    ]


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def record_switch(run_dir: Path, switch: PlanSwitch) -> None:
    """Append the change to decisions.jsonl."""
    append_line(run_dir / DECISIONS_FILE, {"action": SWITCH, **asdict(switch)})


def end(run_dir: Path, steps: float, save_final: bool = True) -> str:
    """Return 'finished' if the run of `steps` steps is done, 'stopped' if a STOP file exists, otherwise ''."""
    if is_finished(latest_step(run_dir), steps, save_final, last_attempt(run_dir)):
        return "finished"
    return "stopped" if (run_dir / STOP_FILE).exists() else ""


def is_finished(saved_step: int, steps: float, save_final: bool, last: Attempt | None) -> bool:
    """Return whether a run of `steps` steps is done, given its newest checkpoint and its newest start."""
    ended_without_save = not save_final and last is not None and last.cause == "finished"
    return saved_step >= steps or ended_without_save


def record(run_dir: Path, attempt: Attempt) -> None:
    """Append one start to attempts.jsonl."""
    append_line(run_dir / "attempts.jsonl", asdict(attempt))


def queued_job(run_dir: Path) -> str:
    """Return the id of the job that was queued last for this run. '' if there is none.

    Raises DamagedRecord if the file holds no job id.
    """
    path = run_dir / "successor"
    text = (read_text(path) or "").strip()
    if text and not re.fullmatch(r"[0-9][0-9_+.\[\]-]{0,63}", text):
        raise DamagedRecord(f"contains {text[:40]!r}, expected the id of a job", "delete it", str(path))
    return text


def bad_hosts(run_dir: Path) -> list[str]:
    """Return hosts that failed: listed hosts, and suspect hosts of at least two crashes.

    Listed hosts went down, failed an examination, were too slow, or computed wrong results.
    """
    crashed = [attempt.failed_host for attempt in attempts(run_dir) if attempt.cause == "crash" and attempt.failed_host]
    return sorted({*listed_bad_hosts(run_dir), *crashed_twice(crashed)})


def listed_bad_hosts(run_dir: Path) -> list[str]:
    """Return `bad_hosts` without the suspect hosts of crashes."""
    return sorted({*_listed(run_dir / "bad_nodes.json"), *untrusted_hosts(run_dir)})


def crashed_twice(hosts: Sequence[str]) -> set[str]:
    """Return hosts that occur at least twice among the suspect hosts of crashes."""
    return {host for host in hosts if hosts.count(host) >= 2}


def untrusted_hosts(run_dir: Path) -> list[str]:
    """Return hosts that computed wrong results or differed from the others at a start (training/agreement.py)."""
    return _listed(run_dir / "untrusted_nodes.json")


def _listed(path: Path) -> list[str]:
    hosts = read_json(path, list, 'restore it, write ["HOST", …], or delete it to use all hosts again') or []
    if not all(isinstance(host, str) for host in hosts):
        raise DamagedRecord("is not a list of host names", "delete it to use all hosts again", str(path))
    return list(hosts)


@dataclass(frozen=True)
class Slow:
    """A host whose ranks were reported as stragglers."""

    host: str
    times: int  # number of steps at which the host was reported
    last_step: int
    slowdown: float  # slowdown that was reported at `last_step`


def slow_hosts(run_dir: Path) -> list[Slow]:
    """Return the slow hosts, most often reported first. Steps that the run later repeated are included."""
    named: dict[str, dict[tuple[int, int], float]] = {}
    for row in read_jsonl(run_dir / "metrics.jsonl"):
        if row.get("kind") == "straggler" and is_row(row) and row["host"]:
            start = row.get("incarnation", 0)
            if not is_count(start):
                start = 0
            named.setdefault(row["host"], {})[start, row["step"]] = row["slowdown"]
    late = [Slow(host, len(steps), max(steps)[1], steps[max(steps)]) for host, steps in named.items()]
    return sorted(late, key=lambda slow: (-slow.times, slow.host))


def add_bad_hosts(run_dir: Path, hosts: Sequence[str]) -> None:
    """Record hosts that the next submission excludes. A user can delete bad_nodes.json to allow them again."""
    _add(run_dir / "bad_nodes.json", bad_hosts(run_dir), hosts)


def distrust(run_dir: Path, hosts: list[str]) -> None:
    """Record hosts that are never used again."""
    _add(run_dir / "untrusted_nodes.json", untrusted_hosts(run_dir), hosts)


def _add(path: Path, known: list[str], hosts: Sequence[str]) -> None:
    if hosts:
        write_atomically(path, strict_json(sorted({*known, *hosts}), indent=None) + "\n")
