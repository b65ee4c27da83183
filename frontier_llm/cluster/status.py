"""Collects the status of runs from their directories and from Slurm."""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from frontier_llm import log
from frontier_llm.cluster import slurm
from frontier_llm.cluster.decide import plan_in_use, plans_out_of_memory
from frontier_llm.cluster.sites import walltime_s
from frontier_llm.config import in_steps
from frontier_llm.config.fields import TokenSteps
from frontier_llm.config.load import read_yaml
from frontier_llm.data.recorded import epochs_read, steps_done
from frontier_llm.errors import FrontierError, Problem
from frontier_llm.planner.predict import START_S
from frontier_llm.run import allocations, run_dir
from frontier_llm.run.complete import MANIFEST, faults, step_name
from frontier_llm.run.evaluations import Evaluated, newest_result
from frontier_llm.run.failure import FILE, Failure, read_failure
from frontier_llm.run.holder import Holder, is_ahead, last_start, living_holder, newest_lock, silence_s
from frontier_llm.run.job import Job, read_job
from frontier_llm.run.records import DamagedRecord, damaged_lines, is_count, read_text
from frontier_llm.run.run_dir import PlanSwitch, Slow
from frontier_llm.run.stage_memory import StageMemory, read_stage_memory
from frontier_llm.run.uploads import UploadRecord, read_uploads
from frontier_llm.units import printable

RUN_MARKS = ("incarnation.json", "metrics.jsonl", "submissions.jsonl")  # any of these files marks a run directory
RECENT = 20  # number of steps whose median is the step time
T = TypeVar("T")


@dataclass(frozen=True)
class Status:
    """The current status of one run."""

    run_dir: str
    state: str  # Slurm's state of the run's job, or 'running', 'finished', 'stopped' or 'not queued'.
    job_id: str | None
    reason: str | None  # Slurm's reason for waiting.
    nodes: str | None
    step: int
    steps: int | None
    tokens: int | None  # tokens that the run has trained on.
    loss: float | None
    tokens_per_s: float | None
    step_time_s: float | None
    eta_s: float | None  # time of training until the last step.
    walltime_left_s: float | None
    slices_left: int | None  # number of further jobs that the run needs, if each has the same walltime.
    checkpoint_step: int
    checkpoint_age_s: float | None
    restarts: int
    causes: tuple[str, ...]  # how each earlier attempt ended.
    bad_hosts: tuple[str, ...]
    slow_hosts: tuple[Slow, ...]  # hosts that were reported as stragglers.
    # Axis (dp, tp, …) → number of calls, and time that a call blocked rank 0 in µs (median and 99th percentile), as
    # recorded at the last save
    blocked: dict[str, dict[str, int]]
    last_failure: str | None
    epochs: dict[str, float] = field(default_factory=dict)  # path of each source → epochs at the newest checkpoint.
    job: Job | None = None  # the record: nodes, spares, continuation, budget.
    node_hours: float = 0.0  # node-hours used by all jobs of the run, as Slurm charges them.
    node_hours_left: float | None = None  # node-hours of the budget that are not used yet.
    node_hours_needed: float | None = None  # node-hours to train until the last step, without starts and saves.
    expected_end_unix_s: float | None = None  # end of the run if its job is running, without time in the queue.
    switch: PlanSwitch | None = None  # the change to the job's roomier plan, if the next start uses it.
    uploads: UploadRecord | None = None  # copies at train.remote.
    memory: tuple[StageMemory, ...] = ()  # memory of each pipeline stage after the newest start's first steps.
    evaluated: Evaluated | None = None  # newest result of `evaluate --follow`.
    damage: tuple[str, ...] = ()  # damaged files; the fields above lack the values of these files.


class RunParts:
    """Reads the parts of one run directory. An unreadable part is recorded, and the other parts are still read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damage: list[str] = []

    def read(self, part: Callable[[Path], T], default: T) -> T:
        """Return `part` of the directory. If the file of this part is damaged, record a problem and return
        `default`.
        """
        try:
            return part(self.directory)
        except FrontierError as error:
            self.damage += [self._relative(problem) for problem in error.problems]
        except OSError as error:
            self.damage.append(
                self._relative(Problem(str(error.filename or self.directory), f"cannot be read: {error.strerror}"))
            )
        return default

    def note(self, problem: Problem) -> None:
        """Record a problem of a part that could still be read."""
        self.damage.append(self._relative(problem))

    def value(self, content: Mapping[str, Any], name: str, key: str, is_sound: Callable[[Any], bool]) -> Any:
        """Return a value of a section. If the value has another type, record a problem and return None."""
        section = content.get(name, {})
        if not isinstance(section, dict):
            self.damage.append(f"config.yaml: {name} is {section!r}, not a section of keys")
            return None
        value = section.get(key)
        if value is None or is_sound(value):
            return value
        self.damage.append(f"config.yaml: {name}.{key} has the invalid value {value!r}")
        return None

    def _relative(self, problem: Problem) -> str:
        """Return the problem on one line, with its path relative to the run directory."""
        where = problem.where
        for directory in (self.directory.absolute(), self.directory):
            where = where.removeprefix(f"{directory}/").removeprefix(str(directory))
        text = f"{where}: {problem.what}" if where else problem.what
        return printable(f"{text}; {problem.fix}" if problem.fix else text)


def require_run_dir(directory: Path) -> None:
    """Raise FrontierError if `directory` is not a run directory."""
    if not directory.is_dir():
        fix = "give the path of a run directory (frontier-llm status lists those under runs/)"
        raise FrontierError("no such run directory", fix, str(directory.absolute()))
    if not any(os.path.lexists(directory / mark) for mark in RUN_MARKS):
        raise FrontierError(
            "is not a run directory", f"a run directory has one of {', '.join(RUN_MARKS)}", str(directory.absolute())
        )


def read_status(directory: Path) -> Status:
    """Return the status of one run directory. Its damaged files are listed in `damage`.

    Raises FrontierError if `directory` is not a run directory.
    """
    require_run_dir(directory)
    parts = RunParts(directory)
    rows = parts.read(run_dir.steps, list[dict[str, Any]]())
    last = rows[-1] if rows else {}
    attempts = parts.read(run_dir.attempts, list[run_dir.Attempt]())
    _note_lines(parts, "metrics.jsonl", run_dir.is_row)
    _note_lines(parts, "attempts.jsonl", run_dir.is_attempt)
    _note_lines(parts, allocations.FILE, allocations.is_allocated)
    settings = _settings(parts)
    checkpoint, saved_unix_s = _checkpoint(parts)
    job_id, fields = _job(_job_ids(parts))
    living = parts.read(living_holder, None)  # a process outside of a job can also train in the directory
    _note_clock(parts, living)
    step = int(last.get("step", checkpoint))
    step_time_s = _step_time_s(rows)
    eta_s = None
    if step_time_s is not None and settings.steps is not None:
        eta_s = step_time_s * max(0, settings.steps - step)
    left_s = _walltime_left_s(fields)
    failure = parts.read(_failure, None)
    job = parts.read(read_job, None)
    slices_left = _slices(eta_s, left_s, fields)
    used = parts.read(lambda path: _used_node_hours(path, fields), 0.0)
    expected_end_unix_s = None
    if eta_s is not None and (living is not None or fields.get("JobState") == "RUNNING"):
        expected_end_unix_s = time.time() + eta_s + (slices_left or 0) * START_S
    end = parts.read(lambda path: run_dir.end(path, settings.steps or math.inf, settings.save_final is not False), "")
    status = Status(
        run_dir=str(directory),
        state=_state(fields, living, end),
        job_id=job_id,
        reason=fields.get("Reason") if fields.get("JobState") == "PENDING" else None,
        nodes=_nodes(fields, living),
        step=step,
        steps=settings.steps,
        tokens=last.get("consumed_tokens") or step * settings.step_tokens or None,
        loss=last.get("loss"),
        tokens_per_s=last.get("tokens_per_s"),
        step_time_s=step_time_s,
        eta_s=eta_s,
        walltime_left_s=left_s,
        slices_left=slices_left,
        checkpoint_step=checkpoint,
        checkpoint_age_s=None if saved_unix_s is None else time.time() - saved_unix_s,
        restarts=max(0, len(attempts) - 1),
        causes=tuple(attempt.cause for attempt in attempts),
        bad_hosts=tuple(parts.read(run_dir.bad_hosts, [])),
        slow_hosts=tuple(parts.read(run_dir.slow_hosts, [])),
        blocked=parts.read(_blocked, {}),
        last_failure=_last_failure(failure, attempts),
        epochs=parts.read(epochs_read, {}),
        job=job,
        node_hours=used,
        node_hours_left=None if job is None or job.max_node_hours is None else job.max_node_hours - used,
        node_hours_needed=None if eta_s is None or job is None else eta_s / 3600 * job.all_nodes,
        expected_end_unix_s=expected_end_unix_s,
        switch=parts.read(lambda path: _switch(path, job, attempts), None),
        uploads=parts.read(read_uploads, None),
        memory=parts.read(read_stage_memory, ()),
        evaluated=parts.read(newest_result, None),
    )
    return replace(status, damage=tuple(dict.fromkeys(parts.damage)))


@dataclass(frozen=True)
class _Settings:
    """Values of a run's configuration. None if a value is missing or damaged."""

    steps: int | None
    save_final: bool | None
    global_batch: int | None
    sequence_length: int | None

    @property
    def step_tokens(self) -> int:
        """Tokens of a step. 0 if they are not known."""
        return (self.global_batch or 0) * (self.sequence_length or 0)


def _settings(parts: RunParts) -> _Settings:
    """Read the configuration. Damaged values are recorded."""
    config = parts.read(_config, dict[str, Any]())
    config = parts.read(lambda path: _counted(config, path), config)
    return _Settings(
        steps=parts.value(config, "train", "steps", is_count),
        save_final=parts.value(config, "train", "save_final", lambda value: isinstance(value, bool)),
        global_batch=parts.value(config, "batch", "global_batch", is_count),
        sequence_length=parts.value(config, "model", "sequence_length", is_count),
    )


def _step_time_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    times = [float(row["step_time_s"]) for row in rows[-RECENT:] if row.get("step_time_s") is not None]
    return statistics.median(times) if times else None


def _switch(directory: Path, job: Job | None, attempts: Sequence[run_dir.Attempt]) -> PlanSwitch | None:
    """Return the newest change to the roomier plan of `job`. None if the job uses its own plan."""
    if job is None or not plan_in_use(job, plans_out_of_memory(tuple(attempts))):
        return None
    switches = (switch for switch in run_dir.plan_switches(directory) if switch.plan == job.plans[1])
    return next(iter(reversed([*switches])), None)


def _last_failure(failure: Failure | None, attempts: Sequence[run_dir.Attempt]) -> str | None:
    """Return the record of the newest start, or else the reason of the last start that failed."""
    if failure:
        return failure.describe()
    failed = [attempt for attempt in attempts if attempt.failed]
    return failed[-1].detail if failed else None


def _state(fields: Mapping[str, str], living: Holder | None, end: str) -> str:
    """Return Slurm's state of the job. Without a job: whether a process holds the run, or how the run ended."""
    if fields:
        return fields["JobState"].lower()
    if living:
        return "running"
    return end or "not queued"


def _nodes(fields: Mapping[str, str], living: Holder | None) -> str | None:
    """Return the nodes of the job, or the host of the process that holds the run."""
    nodes = fields.get("NodeList", "(null)")
    if nodes not in ("", "(null)"):
        return nodes
    return living.host if living else None


def read_statuses(directories: Iterable[Path]) -> tuple[list[Status], list[Problem]]:
    """Return the status of each readable run, and the problems of the runs that cannot be read."""
    statuses: list[Status] = []
    problems: list[Problem] = []
    for directory in directories:
        try:
            statuses.append(read_status(directory))
        except FrontierError as error:
            problems += error.problems
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            what = f"cannot be shown: {type(error).__name__}: {error}"
            problems.append(
                Problem(str(directory), what, "report this, with the files at the top level of the run directory")
            )
    return statuses, problems


def _used_node_hours(directory: Path, fields: Mapping[str, str]) -> float:
    """Return the node-hours of all jobs of the run. The running job counts until now."""
    known = allocations.allocations(directory)
    billed = slurm.billed_node_hours([allocated.job_id for allocated in known], timeout_s=10.0)
    used = allocations.node_hours(directory, billed)
    running = [one for one in known if one.job_id == fields.get("JobId") and fields.get("JobState") == "RUNNING"]
    if not running or running[-1].job_id in billed:
        return used
    newest = running[-1]
    return used + newest.nodes * max(0.0, time.time() - newest.seen_unix_s) / 3600


def _note_lines(parts: RunParts, name: str, is_sound: Callable[[Mapping[str, Any]], bool]) -> None:
    """Record that lines of a file are damaged and were ignored."""
    if what := parts.read(lambda directory: damaged_lines(directory / name, is_sound), ""):
        parts.note(Problem(name, what))


def _job_ids(parts: RunParts) -> list[str]:
    """Return the ids of the job that started last and of the job that was queued last.

    If the file with one of the two ids is damaged, the other id is still returned.
    """
    started = parts.read(lambda directory: str(last_start(directory).get("job_id", "")), "")
    queued = parts.read(run_dir.queued_job, "")
    return [job_id for job_id in dict.fromkeys((started, queued)) if job_id]


def _note_clock(parts: RunParts, living: Holder | None) -> None:
    """Record that a process counts as alive only because the clock of its host is ahead."""
    if living is None or living.host == socket.gethostname():
        return
    path = newest_lock(parts.directory)
    ahead_s = -parts.read(lambda _: silence_s(path), 0.0)
    if is_ahead(-ahead_s):
        what = f"the last heartbeat of {living.describe()} is {ahead_s:,.0f} s in the future"
        parts.note(
            Problem(str(path), what, "the next start waits a minute for a new one, and takes over if none is written")
        )


def _checkpoint(parts: RunParts) -> tuple[int, float | None]:
    """Return (step, Unix time of writing) of the newest complete checkpoint.

    Note the problems of newer checkpoints that are incomplete.
    """

    def newest(directory: Path) -> tuple[int, float | None]:
        folder = directory / "checkpoints"
        for step, problem in faults(folder):
            if problem is None:
                return step, (folder / step_name(step) / MANIFEST).stat().st_mtime
            parts.note(problem)
        return 0, None

    none: tuple[int, float | None] = (0, None)
    return parts.read(newest, none)


def _failure(directory: Path) -> Failure | None:
    """Return the record of the last failure. Raises DamagedRecord if the file contains no record."""
    path = directory / FILE
    text = read_text(path)
    if text is None:
        return None
    failure = read_failure(directory)
    if failure is None:
        raise DamagedRecord("is not the record of a failure", "the next start replaces it", str(path))
    return failure


def _config(directory: Path) -> dict[str, Any]:
    """Return the content of the run's config.yaml, or else of its run.yaml. Empty if neither exists yet.

    Raises FrontierError for a damaged file.
    """
    for name in ("config.yaml", "run.yaml"):
        if os.path.lexists(directory / name):
            read_text(directory / name)  # raises an error if the name is not a regular file
            return read_yaml(directory / name)
    return {}


def _counted(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the configuration with durations in tokens converted to steps.

    Raises FrontierError for a duration without an end.
    """
    content: dict[str, Any] = in_steps(config, steps_done(directory))
    train = content.get("train")
    if isinstance(train, dict) and isinstance(train.get("steps"), TokenSteps):
        return {**content, "train": {**train, "steps": int(train["steps"])}}
    return content


def _blocked(directory: Path) -> dict[str, dict[str, int]]:
    """Return the axes of the newest communication record that have all three shown counts."""
    rows = (row for row in reversed(run_dir.rows(directory)) if row.get("kind") == "communication")
    axes: Any = next((row.get("axes", {}) for row in rows), {})
    if not isinstance(axes, dict):
        return {}
    keys = ("calls", "p50_us", "p99_us")
    return {
        axis: row for axis, row in axes.items() if isinstance(row, dict) and all(is_count(row.get(key)) for key in keys)
    }


def _job(ids: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Return the job that trains the run, with its fields. If there is none, return the queued job of the run."""
    with suppress(FrontierError):  # without Slurm the directory still gives the other facts
        for job_id in ids:
            fields = slurm.job_fields(job_id)
            if fields.get("JobState") in slurm.ACTIVE:
                return job_id, fields
    return next(iter(ids), None), {}


def _walltime_left_s(fields: dict[str, str]) -> float | None:
    limit_s = walltime_s(fields.get("TimeLimit", ""))  # None for UNLIMITED and Partition_Limit
    if fields.get("JobState") != "RUNNING" or limit_s is None:
        return None
    return limit_s - (walltime_s(fields.get("RunTime", "")) or 0)


def _slices(eta_s: float | None, left_s: float | None, fields: dict[str, str]) -> int | None:
    limit_s = walltime_s(fields.get("TimeLimit", ""))
    if eta_s is None or left_s is None or not limit_s:
        return None
    return max(0, math.ceil((eta_s - left_s) / limit_s))


def find_runs(root: Path = Path("runs")) -> list[Path]:
    """Return `root` if it is a run directory, otherwise the run directories below it, newest first.

    Warns of a folder that cannot be read.
    """
    runs = []

    def warn(error: OSError) -> None:
        if error.filename != str(root) or not isinstance(error, FileNotFoundError):
            log.warn(f"{error.filename}: cannot be read: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=warn):
        here = Path(folder)
        if not {*RUN_MARKS}.isdisjoint([*files, *folders]):
            runs.append(here)
            folders.clear()  # runs are not nested, and a run has thousands of logs and shards
        linked = [here / name for name in folders if (here / name).is_symlink()]  # os.walk does not enter them
        runs += [path for path in linked if any((path / mark).exists() for mark in RUN_MARKS)]
    return sorted(runs, key=_changed_unix_s, reverse=True)


def _changed_unix_s(run: Path) -> float:
    """Return the time of the last change of a marking file. 0 if none can be read."""
    times = [0.0]
    for mark in RUN_MARKS:
        with suppress(OSError):
            times.append((run / mark).stat().st_mtime)
    return max(times)
