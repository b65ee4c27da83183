"""Queues a run: checks the request, copies code and configuration into the run directory, and calls sbatch once.

* `RUN_DIR/run.yaml`: the resolved configuration that the job reads.
* `RUN_DIR/code-DIGEST/`: copies of the package, launch/, slurm/, configs/ and plugin files.
* `RUN_DIR/job.json`: the record of the job.
* `RUN_DIR/job.sbatch`: the script, which a successor job uses again.
* `RUN_DIR/submissions.jsonl`: one line per call of sbatch.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
from typing import Any

from frontier_llm.cluster import slurm
from frontier_llm.cluster.batch import RUN_FILE
from frontier_llm.cluster.code import code_digest, plugin_places, snapshot
from frontier_llm.cluster.readiness import Readiness, before_the_queue
from frontier_llm.cluster.sbatch import JobScript, render
from frontier_llm.cluster.sbatch_options import as_options, option_problems
from frontier_llm.cluster.sites import Site, format_walltime, longer_jobs, request_problems, whole_replicas
from frontier_llm.cluster.warning_time import MIN_WARNING_S, next_warning_s
from frontier_llm.config import RunConfig, dump, saves_nothing
from frontier_llm.errors import ConfigError, Problem
from frontier_llm.files import write_atomically
from frontier_llm.planner.predict import START_S, PointPrediction, walltime_minutes
from frontier_llm.run import hostlist, run_dir
from frontier_llm.run.holder import jobs, reserved
from frontier_llm.run.job import Job, read_job, write_job
from frontier_llm.run.launchers import STORE_CONNECTIONS
from frontier_llm.run.rank_env import environ, environment
from frontier_llm.topology.plan import plan_problems
from frontier_llm.units import format_seconds, plural

SCRIPT = "job.sbatch"
SHARED_IMPORT_NODES = 64  # runs on more nodes must not import torch from a shared file system
QUEUE_SLACK_MINUTES = 5  # a job that waits this long can still end before the maintenance


@dataclass(frozen=True)
class JobRequest:
    """A job, and the resources that it requests from Slurm."""

    job: Job
    config: RunConfig
    site: Site
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    # walltime that the user gave; None: the predicted time, limited to the site's longest walltime.
    minutes: int | None = None
    shortened_minutes: int | None = None  # walltime of the first job if it ends before a maintenance.
    dependency: str | None = None
    exclude: tuple[str, ...] = ()
    name: str | None = None
    saves: bool = True  # False: a run that is never continued, and so needs no time to save.
    step_s: float = 0.0  # predicted time of a step; 0: not predicted yet.
    job_s: float | None = None  # walltime in seconds for all remaining steps; None: not predicted yet.
    job_tasks_per_node: int | None = None  # ranks per node of the running job; None: Slurm does not run the job yet.

    @property
    def is_running(self) -> bool:
        """True if the job already runs: Slurm has then accepted it, and its warning time is fixed."""
        return self.job_tasks_per_node is not None

    @property
    def tasks_per_node(self) -> int:
        """Number of ranks per node."""
        return self.job_tasks_per_node or self.site.tasks_per_node

    @property
    def slice_minutes(self) -> int | None:
        """Walltime of one job in minutes. None if only Slurm knows it."""
        if self.minutes is not None:
            return self.minutes
        longest = self.site.max_minutes(self.job.all_nodes, self.partition)
        if longest is None or self.job_s is None:
            return longest
        needed_s = max(self.job_s + self.job.warning_s, 2 * self.job.warning_s)
        return min(longest, walltime_minutes(needed_s))

    def with_prediction(self, predicted: PointPrediction) -> JobRequest:
        """Return the request with the predicted times, and with the resulting warning time."""
        steps = max(0, self.config.train.steps - run_dir.latest_step(self.job.directory))
        return replace(self._with_step(predicted.step_time_s), job_s=predicted.job_s(steps))

    def _with_step(self, step_s: float) -> JobRequest:
        predicted = replace(self, step_s=step_s)
        if self.is_running:
            return predicted
        if not self.saves or saves_nothing(self.config.train):
            warning_s = MIN_WARNING_S
        else:
            warning_s = next_warning_s(self.job.directory, self.site, step_s)
        return replace(predicted, job=replace(self.job, warning_s=float(warning_s)))


def wanted_job(config: RunConfig, site: Site, nodes: int, **settings: Any) -> Job:
    """Return the record of a job that reads its configuration from the run directory.

    `settings` are further fields of `Job`.
    """
    directory = Path(config.train.run_dir).resolve()
    return Job(
        run_dir=str(directory),
        words=(str(directory / RUN_FILE), f"machine={site.machine}", "ops.no_jit=true"),
        site=site.name,
        nodes=nodes,
        **{"warning_s": float(site.warning_time_s), **settings},
    )


@dataclass(frozen=True)
class Submission:
    """The script and command line for sbatch. `job_id` is None until the job is queued."""

    script: str
    command: tuple[str, ...]
    job: Job
    variables: dict[str, str] = field(default_factory=dict)
    job_id: str | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the submission for --json."""
        return {
            "job_id": self.job_id,
            "run_dir": self.job.run_dir,
            "command": list(self.command),
            "variables": self.variables,
            "job": asdict(self.job),
            "script": self.script,
        }


def whole_node_problems(request: JobRequest) -> Iterator[Problem]:
    """Yield a problem if the ranks do not divide into replicas. The fix names the nearest legal numbers of nodes."""
    parallel = request.config.parallel
    per_node = request.tasks_per_node
    nodes = request.job.nodes
    if nodes not in (valid := whole_replicas(nodes, per_node, parallel.model_ranks)):
        what = (
            f"{plural(nodes, 'node')} of {per_node} ranks cannot be divided into replicas of tensor "
            f"{parallel.tensor} x pipeline {parallel.pipeline} ranks"
        )
        yield Problem("--nodes", what, f"--nodes {' or '.join(map(str, valid))}, or change the degrees")


def problems(request: JobRequest) -> Iterator[Problem]:
    """Yield the problems that would make the job fail later: limits of the site, layout, invalid names."""
    yield from job_problems(request)
    yield from layout_problems(request)
    yield from walltime_problems(request)


def job_problems(request: JobRequest) -> Iterator[Problem]:
    """Yield the problems for which the site or Slurm would refuse the job: limits, options and invalid names."""
    job = request.job
    site = request.site
    if not request.is_running:
        yield from request_problems(site, job.all_nodes, request.minutes, request.account, request.partition)
    if request.qos in site.unchained_qos and job.continuation != "never":
        what = f"{site.name} does not allow jobs with QOS {request.qos} to continue themselves"
        yield Problem("--qos", what, "add --continue-with never")
    yield from option_problems(job.sbatch)
    if job.spares < 0:
        yield Problem("--spares", f"is {job.spares}", "pass 0 or more")
    for flag, value in (("--account", request.account), ("--partition", request.partition), ("--qos", request.qos)):
        if value is not None and not value.replace("-", "").replace("_", "").replace(".", "").isalnum():
            yield Problem(flag, f"{value!r} has characters that are not allowed", "use letters, digits, - _ .")


def layout_problems(request: JobRequest) -> Iterator[Problem]:
    """Yield the rules that the layout violates on the job's nodes."""
    job = request.job
    if job.nodes >= 1:
        yield from list(whole_node_problems(request)) or plan_problems(
            request.config, job.nodes * request.tasks_per_node
        )


def walltime_problems(request: JobRequest) -> Iterator[Problem]:
    """Yield a problem if the walltime leaves too little time to train and to save."""
    warning_s = request.job.warning_s
    if request.slice_minutes is not None and 2 * warning_s > 60 * request.slice_minutes:
        what = (
            f"{format_walltime(request.slice_minutes)} is too short: ranks are warned to save "
            f"{format_seconds(warning_s)} before its end, and it must be at least twice as long"
        )
        yield Problem("--time", what, more_time(request, -(-2 * int(warning_s) // 60)))


def before_maintenance(request: JobRequest, now_unix_s: float, maintenance: slurm.Maintenance | None) -> JobRequest:
    """Return the request with a first job that ends before the maintenance, if it would otherwise cross its start.

    Slurm starts a job only if its walltime ends before the maintenance. The request is unchanged if the user gave the
    walltime, if no later job could continue the run, or if the time until the maintenance is too short to train.
    """
    minutes = request.slice_minutes
    if request.job.continuation == "never" or saves_nothing(request.config.train):
        return request
    if maintenance is None or minutes is None or request.minutes is not None:
        return request
    room = int((maintenance.starts_unix_s - now_unix_s) / 60) - QUEUE_SLACK_MINUTES
    fewest_s = START_S + request.step_s + 2 * request.job.warning_s
    if room >= minutes or 60 * room < fewest_s:
        return request
    return replace(request, shortened_minutes=room)


def more_time(request: JobRequest, minutes: int) -> str:
    """Return advice on how a job with this number of nodes gets `minutes` of walltime."""
    nodes = request.job.all_nodes
    longest = request.site.max_minutes(nodes, request.partition)
    if longest is None or minutes <= longest:
        return f"--time {format_walltime(minutes)} or more"
    elsewhere = longer_jobs(request.site, nodes, minutes, request.partition)
    return "; or ".join(["make steps shorter by a smaller batch.global_batch", *elsewhere])


def prepare(request: JobRequest) -> Submission:
    """Return script and command line without writing anything. Raises ConfigError with all problems."""
    if refusals := list(problems(request)):
        raise ConfigError(refusals)
    directory = request.job.directory
    model = request.config.model.name
    script = JobScript(
        name=request.name or model,
        about=f"{model} on {request.job.nodes * request.tasks_per_node} ranks, queued by frontier-llm submit",
        run_dir=str(directory),
        nodes=request.job.all_nodes,
        site=request.site.name,
        minutes=request.slice_minutes,
        warning_s=round(request.job.warning_s),
    )
    exclude = sorted({*request.exclude, *run_dir.bad_hosts(directory)})
    options = {
        **as_options(request.job.sbatch),
        "account": request.account,
        "partition": request.partition,
        "qos": request.qos,
        "dependency": request.dependency,
        "exclude": hostlist.compress(exclude),
        # The script does not contain this time, because later jobs use the same script after the maintenance.
        "time": str(request.shortened_minutes or ""),
    }
    return Submission(
        script=render(script, request.site),
        command=sbatch_command(directory, options),
        job=request.job,
        variables=job_variables(request),
    )


def job_variables(request: JobRequest) -> dict[str, str]:
    """Return the variables that sbatch passes to the job."""
    code = f"code-{code_digest(request.site, request.config.plugins)[:12]}"
    return {
        "FRONTIER_LLM_PYTHON": environ("FRONTIER_LLM_PYTHON") or sys.executable,
        "FRONTIER_LLM_ROOT": str(request.job.directory / code),
        "FRONTIER_LLM_SITE": request.site.name,
    }


def readiness(request: JobRequest, submission: Submission) -> Readiness:
    """Check that the packages that the job needs are installed at the site, and that its number of nodes can start."""
    found = before_the_queue(request.config, request.site, request.job.directory, submission.variables)
    if not found.is_checkable:
        return found
    return replace(found, problems=(*found.problems, *start_problems(request)))


def start_problems(request: JobRequest, limits: Callable[[int], tuple[int, int]] = getrlimit) -> Iterator[Problem]:
    """Yield the reasons why a job on many nodes could not start, or would be slow to start.

    `limits` returns the soft and the hard limit of a resource.
    """
    site = request.site
    ranks = request.job.nodes * request.tasks_per_node
    connections = STORE_CONNECTIONS * ranks
    hard = limits(RLIMIT_NOFILE)[1] if site.open_files is None else site.open_files
    if request.config.comm.backend != "mpi" and hard != RLIM_INFINITY and connections > hard:
        what = (
            f"{ranks} ranks open up to {connections} connections to the store of rank 0 ({STORE_CONNECTIONS} per "
            f"rank), and a process may open {hard} files (ulimit -Hn)"
        )
        most = hard // (STORE_CONNECTIONS * request.tasks_per_node)
        fix = f"--nodes {most} or less; or set open_files in the site file to the limit of its compute nodes"
        yield Problem("--nodes", what, fix)
    if imports_from_shared_files(request) and request.job.all_nodes > SHARED_IMPORT_NODES:
        what = (
            f"{request.job.all_nodes} nodes would import torch from a shared file system, and at most "
            f"{SHARED_IMPORT_NODES} may: 8 nodes of Frontier took 4 min from NFS"
        )
        fix = (
            "export FRONTIER_LLM_ENV_ARCHIVE=ENV.tar.gz (docs/frontier.md, section 1) or FRONTIER_LLM_CONTAINER; or "
            "set environment_is_local=true in the site file if the environment lies on every node"
        )
        yield Problem("FRONTIER_LLM_PYTHON", what, fix)


def imports_from_shared_files(request: JobRequest) -> bool:
    """Return True if the ranks would import torch from files that all nodes share. A container image is a single
    file.
    """
    site = request.site
    elsewhere = site.container or environ("FRONTIER_LLM_CONTAINER") or environ("FRONTIER_LLM_ENV_ARCHIVE")
    return site.bind == "gcd" and not site.environment_is_local and not elsewhere


def submit(request: JobRequest) -> Submission:
    """Check the request, copy the code and queue the job. Return the submission with the job's id.

    Raises FrontierError before anything is queued.
    """
    submission = prepare(request)
    readiness(request, submission).refuse()
    return queue_checked(request, submission)


def queue_checked(request: JobRequest, submission: Submission) -> Submission:
    """Copy the code and queue the job of a request whose installation has been checked."""
    directory = request.job.directory
    run_dir.share_with_group(directory)
    read_job(directory)  # raises an error if a damaged record exists, which must not be replaced
    _refuse_busy(request)
    with reserved(directory):
        code = Path(submission.variables["FRONTIER_LLM_ROOT"])
        snapshot(code, request.site, request.config.plugins)
        write_atomically(directory / RUN_FILE, dump(_frozen(request, code)))
        write_job(request.job)
        write_atomically(directory / SCRIPT, submission.script)
        job_id = queue(directory, submission.command, submission.variables)
    entry = {
        "job_id": job_id,
        "unix_s": time.time(),
        "nodes": request.job.all_nodes,
        "command": list(submission.command),
    }
    run_dir.append_line(directory / "submissions.jsonl", entry)
    return replace(submission, job_id=job_id)


def _frozen(request: JobRequest, code: Path) -> RunConfig:
    """Return the configuration that the job reads.

    The configuration has the absolute run directory, and paths of copied plugin files relative to that directory.
    """
    copies = {
        name: str(code.relative_to(request.job.directory) / place)
        for name, place in plugin_places(request.config.plugins).items()
    }
    return request.config.model_copy(
        update={
            "train": request.config.train.model_copy(update={"run_dir": request.job.run_dir}),
            "plugins": tuple(copies.get(name, name) for name in request.config.plugins),
        }
    )


def sbatch_command(directory: Path, options: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return the sbatch command for the script of a run directory. Options without a value are left out."""
    # The job starts in the present directory (chdir), so that relative paths of the configuration stay valid.
    # SBATCH_EXPORT=NONE in the user's shell would drop the job's variables.
    own = {"output": str(directory / "job-%j.out"), "chdir": os.getcwd(), "export": "ALL"}
    words = (f"--{name}={value}" for name, value in {**options, **own}.items() if value)
    return ("sbatch", "--parsable", *words, str(directory / SCRIPT))


def queue(
    directory: Path, command: Sequence[str], variables: Mapping[str, str], patience_s: float = slurm.AT_ONCE_S
) -> str:
    """Queue a job and return its id. The run directory records it as the job that was queued last.

    sbatch is repeated for `patience_s` while the Slurm controller does not respond.
    """
    env = {**slurm.environment_of_next_job(environment()), **variables}
    job_id = slurm.queue(command, env, patience_s)
    write_atomically(directory / "successor", job_id + "\n")
    return job_id


def _refuse_busy(request: JobRequest) -> None:
    """Raise ConfigError if a job of this run is active, or if the user has too many queued jobs for the site."""
    busy = []
    for job_id in jobs(request.job.directory):
        fields = slurm.job_fields(job_id)
        if fields.get("JobState") in slurm.ACTIVE:
            owner = fields.get("UserId", "an unknown user").partition("(")[0]
            what = f"job {job_id} of {owner} already runs or is queued for {request.job.directory}"
            busy.append(Problem("train.run_dir", what, f"scancel {job_id}, or set another train.run_dir"))
    limit = request.site.max_queued_jobs
    if limit is not None:
        mine = len(slurm.call(["squeue", "--me", "--noheader", "--format=%A"]).split())
        if mine >= limit:
            busy.append(
                Problem(
                    "queue",
                    f"{mine} of your jobs are queued, and {request.site.name} allows {limit}",
                    "wait, or cancel some with scancel",
                )
            )
    if busy:
        raise ConfigError(busy)


def describe(request: JobRequest, submission: Submission) -> str:
    """Return a short description of a submission for the user."""
    job = request.job
    nodes = f"{job.nodes} + {job.spares} spare nodes" if job.spares else plural(job.nodes, "node")
    minutes = request.shortened_minutes or request.slice_minutes
    walltime = f", {format_walltime(minutes)} per job" if minutes else ""
    outcome = f"->  job {submission.job_id}" if submission.job_id else "(not run)"
    return "\n".join(
        [
            f"{request.config.model.name}: {nodes} of {request.site.name}{walltime}, then {job.continuation}",
            f"run directory {job.directory}",
            f"{shlex.join(submission.command)}  {outcome}",
        ]
    )


def default_account() -> str | None:
    """Return the account that Slurm uses if no -A is given."""
    return environ("SBATCH_ACCOUNT") or environ("SLURM_ACCOUNT")
