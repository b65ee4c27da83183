"""Where runs stand, from their directories and from Slurm."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from frontier_llm.cluster import hostlist, run_dir, slurm
from frontier_llm.cluster.holder import jobs, living_holder
from frontier_llm.cluster.run_dir import Slow
from frontier_llm.cluster.sites import walltime_s
from frontier_llm.errors import FrontierError
from frontier_llm.failure import read_failure
from frontier_llm.units import format_count, format_seconds, plural

RUN_MARKS = ("incarnation.json", "metrics.jsonl", "submissions.jsonl")  # a directory with one of these is a run's
BAR = 24  # characters
RECENT = 20  # steps whose median gives the speed


@dataclass(frozen=True)
class Status:
    """One run, now."""

    run_dir: str
    state: str  # Slurm's state of the job that holds it, 'running', 'finished', 'stopped' or 'not queued'
    job_id: str | None
    reason: str | None  # why it waits
    nodes: str | None
    step: int
    steps: int | None
    tokens: int | None  # trained on so far
    loss: float | None
    tokens_per_s: float | None
    step_time_s: float | None
    eta_s: float | None  # of compute until the last step
    walltime_left_s: float | None
    slices_left: int | None  # further jobs of the same length
    checkpoint_step: int
    checkpoint_age_s: float | None
    restarts: int
    causes: tuple[str, ...]  # how each earlier attempt ended
    bad_hosts: tuple[str, ...]
    slow_hosts: tuple[Slow, ...]  # named as stragglers
    blocked: dict[str, dict[str, int]]  # by axis: calls, p50_us and p99_us of how long one blocked on rank 0, at the last save
    last_failure: str | None


def read_status(directory: Path) -> Status:
    """The status of one run directory. Raises FrontierError when it is none."""
    if not directory.is_dir():
        raise FrontierError("no such run directory", "give the path of a run directory, or none for all under runs/", str(directory))
    if not any((directory / mark).exists() for mark in RUN_MARKS):
        raise FrontierError("holds no run", f"a run has one of {', '.join(RUN_MARKS)}", str(directory))
    rows = run_dir.steps(directory)
    last = rows[-1] if rows else {}
    attempts = run_dir.attempts(directory)
    config = _config(directory)
    train = config.get("train", {})
    target = train.get("steps")
    step_tokens = config.get("batch", {}).get("global_batch", 0) * config.get("model", {}).get("sequence_length", 0)
    checkpoint = run_dir.latest_step(directory)
    job_id, fields = _job(directory)
    living = living_holder(directory)  # also of a run without any job
    step = int(last.get("step", checkpoint))
    times = [float(row["step_time_s"]) for row in rows[-RECENT:] if "step_time_s" in row]
    step_time_s = statistics.median(times) if times else None
    eta_s = step_time_s * max(0, target - step) if step_time_s is not None and target is not None else None
    left_s = _walltime_left_s(fields)
    failures = [attempt for attempt in attempts if attempt.failed]
    failure = read_failure(directory)
    end = run_dir.end(directory, target or math.inf, train.get("save_final", True))
    pointer = directory / "checkpoints" / "LATEST"
    return Status(
        run_dir=str(directory),
        state=fields["JobState"].lower() if fields else "running" if living else end or "not queued",
        job_id=job_id,
        reason=fields.get("Reason") if fields.get("JobState") == "PENDING" else None,
        nodes=fields["NodeList"] if fields.get("NodeList", "(null)") not in ("", "(null)") else living.host if living else None,
        step=step,
        steps=target,
        tokens=last.get("consumed_tokens") or step * step_tokens or None,
        loss=last.get("loss"),
        tokens_per_s=last.get("tokens_per_s"),
        step_time_s=step_time_s,
        eta_s=eta_s,
        walltime_left_s=left_s,
        slices_left=_slices(eta_s, left_s, fields),
        checkpoint_step=checkpoint,
        checkpoint_age_s=time.time() - pointer.stat().st_mtime if pointer.is_file() else None,
        restarts=max(0, len(attempts) - 1),
        causes=tuple(attempt.cause for attempt in attempts),
        bad_hosts=tuple(run_dir.bad_hosts(directory)),
        slow_hosts=tuple(run_dir.slow_hosts(directory)),
        blocked=_blocked(directory),
        last_failure=failure.describe() if failure else failures[-1].detail if failures else None,
    )


def _config(directory: Path) -> dict[str, Any]:
    """The run's own configuration, as it is written; empty where it has none yet."""
    path = next((path for path in (directory / "config.yaml", directory / "run.yaml") if path.is_file()), None)
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path else {}


def _blocked(directory: Path) -> dict[str, dict[str, int]]:
    rows = (row for row in reversed(run_dir.rows(directory)) if row.get("kind") == "communication")
    return next((row.get("axes", {}) for row in rows), {})


def _job(directory: Path) -> tuple[str | None, dict[str, str]]:
    """The job that holds the run, or else the one queued for it."""
    ids = jobs(directory)
    with suppress(FrontierError):  # no Slurm here: the directory still tells the rest
        for job_id in ids:
            fields = slurm.job_fields(job_id)
            if fields.get("JobState") in slurm.ACTIVE:
                return job_id, fields
    return next(iter(ids), None), {}


def _walltime_left_s(fields: dict[str, str]) -> float | None:
    limit_s = walltime_s(fields.get("TimeLimit", ""))  # None: UNLIMITED, Partition_Limit
    if fields.get("JobState") != "RUNNING" or limit_s is None:
        return None
    return limit_s - (walltime_s(fields.get("RunTime", "")) or 0)


def _slices(eta_s: float | None, left_s: float | None, fields: dict[str, str]) -> int | None:
    limit_s = walltime_s(fields.get("TimeLimit", ""))
    if eta_s is None or left_s is None or not limit_s:
        return None
    return max(0, math.ceil((eta_s - left_s) / limit_s))


def find_runs(root: Path = Path("runs")) -> list[Path]:
    """`root` itself or the run directories below it, newest first."""
    runs = []
    for folder, folders, files in os.walk(root):
        if not {*RUN_MARKS}.isdisjoint(files):
            runs.append(Path(folder))
            folders.clear()  # a run holds no other, but thousands of logs and shards
    return sorted(runs, key=lambda path: -max((path / mark).stat().st_mtime for mark in RUN_MARKS if (path / mark).is_file()))


def render(statuses: Sequence[Status]) -> str:
    """For a terminal."""
    return "\n\n".join(_render_one(status) for status in statuses)


def _render_one(status: Status) -> str:
    """One line of heading, then facts under aligned names; what is not known is left out."""
    job = f"job {status.job_id} " if status.job_id else ""
    where = f" on {status.nodes}" if status.nodes else ""
    reason = f" ({status.reason})" if status.reason and status.reason != "None" else ""
    facts = [("step", _progress(status)), ("speed", _speed(status)), ("time left", _time_left(status))]
    age = f", {format_seconds(status.checkpoint_age_s)} ago" if status.checkpoint_age_s is not None else ""
    facts.append(("checkpoint", f"step {status.checkpoint_step:,}{age}" if status.checkpoint_step else "none yet"))
    if status.restarts:
        counts = {cause: status.causes.count(cause) for cause in dict.fromkeys(status.causes)}
        facts.append(("restarts", f"{status.restarts} ({', '.join(f'{count} {cause}' for cause, count in counts.items())})"))
    facts += [("waits", _waits(axis, row)) for axis, row in status.blocked.items()]
    facts += [("slow", _slow(slow, slow.host in status.bad_hosts)) for slow in status.slow_hosts]
    facts += [("failure", status.last_failure or ""), ("excluded", hostlist.compress(status.bad_hosts) if status.bad_hosts else "")]
    return "\n".join([f"{status.run_dir}   {job}{status.state}{where}{reason}", *(f"  {name:<11}{text}" for name, text in facts if text)])


def _progress(status: Status) -> str:
    if not status.steps:
        return f"{status.step:,}"
    done = min(1.0, status.step / status.steps)
    filled = round(BAR * done)
    return f"{status.step:,} of {status.steps:,}  {'█' * filled}{'░' * (BAR - filled)} {done:.1%}"


def _speed(status: Status) -> str:
    parts = (
        "" if status.loss is None else f"loss {status.loss:.4f}",
        "" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f} tokens/s",
        "" if status.step_time_s is None else f"{format_seconds(status.step_time_s)} per step",
        f"{format_count(status.tokens)} tokens seen" if status.tokens else "",
    )
    return ", ".join(filter(None, parts))


def _waits(axis: str, row: dict[str, int]) -> str:
    median, most = (format_seconds(row[key] * 1e-6) for key in ("p50_us", "p99_us"))
    return f"{axis} half below {median}, 99 % below {most} of {row['calls']:,} calls"


def _slow(slow: Slow, excluded: bool) -> str:
    times = "once" if slow.times == 1 else f"{slow.times} times"
    wish = "" if excluded else f"; --exclude={slow.host} leaves it out"
    return f"{slow.host} {times}, at step {slow.last_step:,} by a factor of {slow.slowdown:.1f}{wish}"


def _time_left(status: Status) -> str:
    if status.eta_s is None or status.state in ("finished", "stopped"):
        return ""
    text = f"{format_seconds(status.eta_s)} of training"
    if status.walltime_left_s is not None:
        more = plural(status.slices_left, "more job") if status.slices_left else "ends in this job"
        text += f", {format_seconds(status.walltime_left_s)} of walltime, {more}"
    return text
