"""Reads and writes `job.json` in the run directory, the record of a job. It has the settings that `submit` or a batch
script chose for a run.

The supervisor, the successor job, `status` and `tune` read this file. It contains no secret.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frontier_llm.errors import suggest
from frontier_llm.files import write_atomically
from frontier_llm.run.records import DamagedRecord, is_count, is_number, read_json
from frontier_llm.units import strict_json

FILE = "job.json"
VERSION = 4
CONTINUATIONS = ("requeue", "successor", "never")
EXAMINED_NODES = 16  # from this number of nodes, every node is examined before the first step by default.
# Node-hours per node of the job that failed starts may use by default: 18 starts of ten minutes
FAILED_START_HOURS = 3.0
ROOMIER_PLAN_VARIABLE = "FRONTIER_LLM_ROOMIER_PLAN"  # is 1 for ranks whose job has another plan that needs less memory
_FIX = "correct it, or delete the file: the next start then writes it again with the values of its script"


@dataclass(frozen=True)
class Job:
    """Settings of a run's jobs: nodes, warning time, budget, and the continuation of an unfinished job."""

    run_dir: str  # absolute path.
    words: tuple[str, ...]  # run file and overrides, in the form that the ranks receive.
    site: str  # name of a site file.
    nodes: int  # nodes on which the ranks run, without the spares.
    warning_s: float  # time before the walltime at which Slurm signals the ranks to save.
    spares: int = 0
    continuation: str = "requeue"  # one of CONTINUATIONS.
    max_node_hours: float | None = None  # budget of all jobs of the run together; None: no limit.
    preflight: bool = False  # examine every node before the first start.
    flags: tuple[str, ...] = ()  # flags of `frontier-llm train`.
    # Limit for starts in a row that end before their first step; None: FAILED_START_HOURS of all nodes.
    failed_start_node_hours: float | None = None
    sbatch: tuple[str, ...] = ()  # additional sbatch options of every job, each KEY=VALUE.
    notice_command: tuple[str, ...] = ()  # program and arguments; run at events (cluster/notices.py).
    webhook_file: str = ""  # file of mode 0600 that contains the address of a webhook; '': no webhook.
    forced: tuple[str, ...] = ()  # sections of the certificate that passed `submit` without a check.
    # Overrides of each plan: the run's own layout, and a layout with lower memory need for a run that is out of memory.
    # () if there is no such layout.
    plans: tuple[tuple[str, ...], ...] = ()

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.run_dir)

    @property
    def all_nodes(self) -> int:
        """Nodes of the allocation, spares included."""
        return self.nodes + self.spares

    @property
    def failed_start_limit(self) -> float:
        """Node-hours that starts in a row may use without a finished step."""
        if self.failed_start_node_hours is not None:
            return self.failed_start_node_hours
        return FAILED_START_HOURS * self.all_nodes


@dataclass(frozen=True)
class _Rule:
    """Condition for the value of one field, and the text that describes it in messages."""

    holds: Callable[[Any], bool]
    expected: str
    since: int = 1  # first version of job.json with this field; an older record gets the field's default


def _is_limit(value: Any) -> bool:
    return value is None or (is_number(value) and value > 0)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _is_plans(value: Any) -> bool:
    return isinstance(value, list) and len(value) in (0, 2) and all(_is_texts(plan) for plan in value)


_RULES = {
    "run_dir": _Rule(lambda value: isinstance(value, str) and Path(value).is_absolute(), "an absolute path"),
    "words": _Rule(lambda value: _is_texts(value) and len(value) > 0, "a list of words that begins with a run file"),
    "site": _Rule(lambda value: isinstance(value, str) and bool(value), "the name of a site"),
    "nodes": _Rule(lambda value: is_count(value) and value > 0, "a number of nodes, 1 or more"),
    "warning_s": _Rule(lambda value: is_number(value) and value >= 0, "seconds, 0 or more"),
    "spares": _Rule(is_count, "a number of nodes, 0 or more"),
    "continuation": _Rule(lambda value: value in CONTINUATIONS, f"one of {', '.join(CONTINUATIONS)}"),
    "max_node_hours": _Rule(_is_limit, "node-hours above 0, or null"),
    "preflight": _Rule(lambda value: isinstance(value, bool), "true or false"),
    "flags": _Rule(_is_texts, "a list of words"),
    "sbatch": _Rule(_is_texts, "a list of KEY=VALUE", since=2),
    "notice_command": _Rule(_is_texts, "a list of words", since=2),
    "webhook_file": _Rule(lambda value: isinstance(value, str), "the path of a file, or an empty text", since=2),
    "failed_start_node_hours": _Rule(_is_limit, "node-hours above 0, or null", since=2),
    "forced": _Rule(_is_texts, "a list of sections", since=3),
    "plans": _Rule(_is_plans, "an empty list, or two lists of overrides", since=4),
}


def read_job(run_dir: Path) -> Job | None:
    """Return the job of a run directory. None if there is no record.

    Raises DamagedRecord if the file is damaged, has a newer version, or belongs to another run. The error names the
    field.
    """
    path = run_dir / FILE
    content: dict[str, Any] | None = read_json(path, dict, _FIX)
    if content is None:
        return None
    version = content.pop("version", None)
    if not is_count(version) or version < 1:
        raise _damaged(path, "version", f"is {version!r}, expected {VERSION}")
    if version > VERSION:
        fix = "use the version of frontier_llm that wrote it, or delete the file"
        raise DamagedRecord(f"version is {version}, but this program reads at most version {VERSION}", fix, str(path))
    for name in content:
        if name not in _RULES:
            raise _damaged(path, name, f"is not a field of a job; {suggest(name, list(_RULES))}")
    for name, rule in _RULES.items():
        if name not in content and version < rule.since:
            continue
        if name not in content:
            raise _damaged(path, name, f"is missing, expected {rule.expected}")
        if not rule.holds(content[name]):
            raise _damaged(path, name, f"is {content[name]!r}, expected {rule.expected}")
    here = run_dir.resolve()
    if Path(content["run_dir"]).resolve() != here:
        what = f"run_dir is {content['run_dir']}, so this is the record of another run"
        fix = f"if the directory was moved, set run_dir to {here} in the file, or delete the file"
        raise DamagedRecord(what, fix, str(path))
    lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
    plans = tuple(tuple(plan) for plan in content.get("plans", ()))
    return Job(**{**content, **lists, "plans": plans})


def _damaged(path: Path, name: str, what: str) -> DamagedRecord:
    return DamagedRecord(f"{name} {what}", _FIX, str(path))


def write_job(job: Job) -> None:
    """Replace the record in the job's run directory. The caller must hold the directory (`holder.reserved`)."""
    job.directory.mkdir(parents=True, exist_ok=True)
    write_atomically(job.directory / FILE, strict_json({"version": VERSION, **asdict(job)}) + "\n")
