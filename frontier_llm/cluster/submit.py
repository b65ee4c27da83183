"""Queue a run: check everything, freeze code and configuration in the run directory, then call sbatch once.

RUN_DIR/run.yaml        the resolved configuration that the job reads
RUN_DIR/code-DIGEST/    the package, launch/, slurm/, configs/ and plugin files as they were
RUN_DIR/job.sbatch      the script; a successor job uses it again
RUN_DIR/submissions.jsonl
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from frontier_llm.cluster import slurm
from frontier_llm.cluster.code import code_digest, plugin_places, snapshot
from frontier_llm.cluster.lead import MIN_LEAD_S, signal_lead_s
from frontier_llm.cluster.readiness import Readiness, before_the_queue
from frontier_llm.cluster.sbatch import JobScript, render
from frontier_llm.cluster.sites import Site, format_walltime, longer_jobs, request_problems, whole_replicas
from frontier_llm.config import RunConfig, dump, saves_nothing
from frontier_llm.errors import ConfigError, Problem
from frontier_llm.files import write_atomically
from frontier_llm.run import hostlist, run_dir
from frontier_llm.run.holder import jobs
from frontier_llm.run.rank_env import environ, environment
from frontier_llm.topology.plan import plan_problems
from frontier_llm.units import format_seconds, plural

SCRIPT = "job.sbatch"


@dataclass(frozen=True)
class JobRequest:
    """What the user wants queued."""

    config: RunConfig
    site: Site
    nodes: int  # that work; spares come on top
    spares: int = 0
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    minutes: int | None = None  # None = the longest that the bin allows
    continue_with: str = "requeue"
    dependency: str | None = None
    exclude: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # of train
    name: str | None = None
    expected_step_s: float = 0.0  # the planner's; counts until the run has measured its own
    max_node_hours: float | None = None  # after which the chain ends in order
    saves: bool = True  # False: a run that nobody continues needs no time to save

    @property
    def directory(self) -> Path:
        """The run directory, absolute."""
        return Path(self.config.train.run_dir).resolve()

    @property
    def lead_s(self) -> int:
        """How long before the walltime the ranks are told."""
        if not self.saves or saves_nothing(self.config.train):
            return MIN_LEAD_S
        return signal_lead_s(self.directory, self.site, self.expected_step_s)

    @property
    def slice_minutes(self) -> int | None:
        """Walltime of one job, or None when only Slurm knows it."""
        return self.minutes or self.site.max_minutes(self.all_nodes, self.partition)

    @property
    def all_nodes(self) -> int:
        """What is asked of Slurm."""
        return self.nodes + self.spares


@dataclass(frozen=True)
class Submission:
    """What is, or with a dry run would be, given to sbatch."""

    script: str
    command: tuple[str, ...]
    directory: Path
    variables: dict[str, str] = field(default_factory=dict)
    job_id: str | None = None

    def as_dict(self) -> dict[str, object]:
        """For --json."""
        return {
            "job_id": self.job_id,
            "run_dir": str(self.directory),
            "command": list(self.command),
            "variables": self.variables,
            "script": self.script,
        }


def _whole_node_problems(request: JobRequest) -> Iterator[Problem]:
    """Nodes whose ranks cannot be cut into replicas; whoever asks for nodes is answered in nodes."""
    parallel = request.config.parallel
    per_node = request.site.tasks_per_node
    if request.nodes not in (valid := whole_replicas(request.nodes, per_node, parallel.model_ranks)):
        what = (
            f"{plural(request.nodes, 'node')} of {per_node} ranks are no whole replicas of tensor "
            f"{parallel.tensor} x pipeline {parallel.pipeline}"
        )
        yield Problem("--nodes", what, f"--nodes {' or '.join(map(str, valid))}, or change the degrees")


def problems(request: JobRequest) -> Iterator[Problem]:
    """Everything that would fail later, found before sbatch is called: the site's limits, the layout, the names."""
    yield from request_problems(request.site, request.all_nodes, request.minutes, request.account, request.partition)
    if request.nodes >= 1:
        yield from list(_whole_node_problems(request)) or plan_problems(
            request.config, request.nodes * request.site.tasks_per_node
        )
    if request.slice_minutes is not None and 2 * request.lead_s > 60 * request.slice_minutes:
        what = (
            f"{format_walltime(request.slice_minutes)}, but saving begins {format_seconds(request.lead_s)} before "
            f"its end"
        )
        yield Problem("--time", what, more_time(request, -(-2 * request.lead_s // 60)))
    if request.qos in request.site.unchained_qos and request.continue_with != "never":
        what = f"{request.site.name} forbids jobs under {request.qos} to continue themselves"
        yield Problem("--qos", what, "add --continue-with never")
    if request.spares < 0:
        yield Problem("--spares", f"{request.spares} nodes", "0 or more")
    for flag, value in (("--account", request.account), ("--partition", request.partition), ("--qos", request.qos)):
        if value is not None and not value.replace("-", "").replace("_", "").replace(".", "").isalnum():
            yield Problem(flag, f"{value!r} is not a name", "letters, digits, - _ .")


def more_time(request: JobRequest, minutes: int) -> str:
    """How a job of these nodes gets so many minutes."""
    longest = request.site.max_minutes(request.all_nodes, request.partition)
    if longest is None or minutes <= longest:
        return f"--time {format_walltime(minutes)} or more"
    elsewhere = longer_jobs(request.site, request.all_nodes, minutes, request.partition)
    return "; or ".join(["shorter steps: a smaller batch.global_batch", *elsewhere])


def prepare(request: JobRequest) -> Submission:
    """The script and the command line. Raises ConfigError with every problem; writes nothing."""
    if refusals := list(problems(request)):
        raise ConfigError(refusals)
    directory = request.directory
    job = JobScript(
        name=request.name or request.config.model.name,
        about=f"{request.config.model.name} on {request.nodes * request.site.tasks_per_node} ranks, queued by "
        f"frontier-llm submit",
        committed=False,
        config=str(directory / "run.yaml"),
        nodes=request.all_nodes,
        site=request.site.name,
        minutes=request.slice_minutes,
        flags=request.flags,
        signal_lead_s=request.lead_s,
    )
    exclude = sorted({*request.exclude, *run_dir.bad_hosts(directory)})
    options = {
        "account": request.account,
        "partition": request.partition,
        "qos": request.qos,
        "dependency": request.dependency,
        "exclude": hostlist.compress(exclude),
    }
    variables = {
        "FRONTIER_LLM_PYTHON": environ("FRONTIER_LLM_PYTHON") or sys.executable,
        "FRONTIER_LLM_ROOT": str(directory / f"code-{code_digest(request.site, request.config.plugins)[:12]}"),
        "FRONTIER_LLM_SITE": request.site.name,
        "FRONTIER_LLM_SPARE_NODES": str(request.spares),
        "FRONTIER_LLM_CONTINUE": request.continue_with,
        "FRONTIER_LLM_SIGNAL_LEAD_S": str(request.lead_s),
        **({"FRONTIER_LLM_MAX_NODE_HOURS": str(request.max_node_hours)} if request.max_node_hours is not None else {}),
    }
    return Submission(render(job, request.site), sbatch_command(directory, options), directory, variables)


def readiness(request: JobRequest, submission: Submission) -> Readiness:
    """What the site has of what the job needs."""
    return before_the_queue(request.config, request.site, submission.directory, submission.variables)


def submit(request: JobRequest) -> Submission:
    """Check, freeze and queue; the result carries the job's id. Raises FrontierError before anything is queued."""
    submission = prepare(request)
    readiness(request, submission).refuse()
    _refuse_busy(request)
    directory = submission.directory
    directory.mkdir(parents=True, exist_ok=True)
    code = Path(submission.variables["FRONTIER_LLM_ROOT"])
    snapshot(code, request.site, request.config.plugins)
    write_atomically(directory / "run.yaml", dump(_frozen(request, code)))
    write_atomically(directory / SCRIPT, submission.script)
    job_id = queue(directory, submission.command, submission.variables)
    entry = {"job_id": job_id, "unix_s": time.time(), "nodes": request.all_nodes, "command": list(submission.command)}
    run_dir.append_line(directory / "submissions.jsonl", entry)
    return replace(submission, job_id=job_id)


def _frozen(request: JobRequest, code: Path) -> RunConfig:
    """The configuration that the job reads: it names the run directory, and the copies of plugin files by paths
    relative to it.
    """
    copies = {
        name: str(code.relative_to(request.directory) / place)
        for name, place in plugin_places(request.config.plugins).items()
    }
    return request.config.model_copy(
        update={
            "train": request.config.train.model_copy(update={"run_dir": str(request.directory)}),
            "plugins": tuple(copies.get(name, name) for name in request.config.plugins),
        }
    )


def sbatch_command(directory: Path, options: Mapping[str, str | None]) -> tuple[str, ...]:
    """For the script of a run directory; an option without a value is left out."""
    # relative paths of the configuration keep their meaning
    own = {"output": str(directory / "job-%j.out"), "chdir": os.getcwd()}
    words = (f"--{name}={value}" for name, value in {**options, **own}.items() if value)
    return ("sbatch", "--parsable", *words, str(directory / SCRIPT))


def queue(directory: Path, command: Sequence[str], variables: Mapping[str, str]) -> str:
    """The id of the new job, which the run directory then names as the one queued last."""
    job_id = slurm.call(command, env={**environment(), **variables}).strip().split(";")[0]
    write_atomically(directory / "successor", job_id + "\n")
    return job_id


def _refuse_busy(request: JobRequest) -> None:
    """One job per run directory, and no more in the queue than the site lets a user have."""
    busy = []
    for job_id in jobs(request.directory):
        if slurm.is_active(job_id):
            what = f"job {job_id} already runs or waits for {request.directory}"
            busy.append(Problem("train.run_dir", what, f"scancel {job_id}, or another run_dir"))
    limit = request.site.max_queued_jobs
    if limit is not None:
        mine = len(slurm.call(["squeue", "--me", "--noheader", "--format=%A"]).split())
        if mine >= limit:
            busy.append(
                Problem(
                    "queue",
                    f"{mine} of your jobs are queued; {request.site.name} takes {limit}",
                    "wait, or scancel some",
                )
            )
    if busy:
        raise ConfigError(busy)


def describe(request: JobRequest, submission: Submission) -> str:
    """What a person wants to see before or after queueing."""
    nodes = f"{request.nodes} + {request.spares} spare nodes" if request.spares else plural(request.nodes, "node")
    minutes = request.slice_minutes
    walltime = f", {format_walltime(minutes)} each slice" if minutes else ""
    outcome = f"->  job {submission.job_id}" if submission.job_id else "(not run)"
    return "\n".join(
        [
            f"{request.config.model.name}: {nodes} of {request.site.name}{walltime}, then {request.continue_with}",
            f"run directory {submission.directory}",
            f"{shlex.join(submission.command)}  {outcome}",
        ]
    )


def default_account() -> str | None:
    """What Slurm itself would take when no -A is given."""
    return environ("SBATCH_ACCOUNT") or environ("SLURM_ACCOUNT")
