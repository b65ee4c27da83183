"""Predicts the cost of a run's jobs on a site, and checks a job before it starts. `submit`, a bare `sbatch` and a
scaling series run the same checks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from frontier_llm import log
from frontier_llm.blueprint.optimizers import state_bytes
from frontier_llm.cluster import slurm, submit
from frontier_llm.cluster.batch import BatchRun
from frontier_llm.cluster.decide import History, reason_to_end
from frontier_llm.cluster.readiness import refuse_unready
from frontier_llm.config import RunConfig, phases_of, saves_between, saves_nothing
from frontier_llm.config.phases import PRODUCTION
from frontier_llm.config.validate import fp16_note
from frontier_llm.errors import ConfigError, Problem
from frontier_llm.machine.load import load_machine
from frontier_llm.planner.predict import START_S, predict
from frontier_llm.run import run_dir
from frontier_llm.run.rank_env import environ
from frontier_llm.tables import aligned
from frontier_llm.topology.plan import plan_problems
from frontier_llm.units import format_bytes, format_hours, plural

BENCHMARK_STEPS = 100  # a run with more steps that costs more than CHEAP_NODE_HOURS needs data.allow_synthetic
CHEAP_NODE_HOURS = 10.0
MANY_NODES = 8  # OLCF measured a slow import of torch on 8 nodes; more nodes get a warning
UNSAVED_STEPS = 20  # a run on synthetic data with at most this number of steps may save no checkpoint


@dataclass(frozen=True)
class Cost:
    """Predicted cost of the remaining steps of a run."""

    config: RunConfig
    directory: Path  # run directory
    done: int  # number of steps done at the newest checkpoint
    step_s: float
    nodes: int  # nodes that Slurm charges, spares included
    slice_hours: float | None  # walltime of one job; None: the site has no limit
    warning_s: float  # warning time at the end of each job, for saving
    chained: bool  # whether an unfinished job is continued by another
    start_s: float = START_S  # time from a job's start to its first step (assumed)

    @property
    def steps(self) -> int:
        """Number of steps left until train.steps."""
        return max(0, self.config.train.steps - self.done)

    @property
    def job_steps(self) -> int:
        """Number of steps of the next job, which ends at its walltime."""
        if self.slice_hours is None:
            return self.steps
        trained_s = self.slice_hours * 3600 - self.start_s - self.warning_s
        return max(0, min(self.steps, int(trained_s / self.step_s)))

    @property
    def job_minutes(self) -> float:
        """Minutes of the next job, including its start."""
        return (self.start_s + self.job_steps * self.step_s) / 60

    @property
    def job_node_hours(self) -> float:
        """Node-hours of the next job, including its start."""
        return self.job_minutes / 60 * self.nodes

    @property
    def job_saves(self) -> int:
        """Number of checkpoints that the next job writes, including the one at its walltime."""
        saves = saves_between(self.config.train, self.done, self.done + self.job_steps)
        ends_early = self.job_steps < self.steps
        return saves + (ends_early and not saves_nothing(self.config.train))

    @property
    def hours(self) -> float:
        """Hours of training, without starts and saves."""
        return self.steps * self.step_s / 3600

    @property
    def node_hours(self) -> float:
        """Node-hours of training, without starts and saves."""
        return self.hours * self.nodes

    @property
    def days(self) -> float:
        """Days of training, including the start of each job. Saves and the time in the queue are not included."""
        chain = self.chain()
        jobs = chain[0] if chain else 1
        return self.hours / 24 + jobs * self.start_s / 86400

    def chain(self) -> tuple[int, float] | None:
        """Return (number of jobs, node-hours) for the remaining steps. Each job is counted with its complete walltime.

        Return None if the walltime is unknown or leaves no time to train.
        """
        if self.slice_hours is None or (trained_h := self.slice_hours - (self.start_s + self.warning_s) / 3600) <= 0:
            return None
        jobs = max(1, math.ceil(self.hours / trained_h)) if self.chained else 1
        return jobs, jobs * self.slice_hours * self.nodes

    def describe(self, max_node_hours: float | None) -> str:
        """Return a text that is logged when a job starts: nodes, minutes, node-hours, checkpoints, and the cost of the
        run.
        """
        steps = f"{plural(self.job_steps, 'step')} of about {self.step_s:.3g} s (predicted)"
        lines = [
            f"cost: this job takes {plural(self.nodes, 'node')} for about {_minutes(60 * self.job_minutes)}, "
            f"{format_hours(self.job_node_hours)} node-hours: {_minutes(self.start_s)} to start (assumed), {steps}",
            f"cost: this job writes {written(self.config, self.job_saves, self.directory)}",
            f"cost: {plural(self.steps, 'step')} are left of the run: {format_hours(self.hours)} hours, "
            f"{format_hours(self.node_hours)} node-hours",
        ]
        if (chain := self.chain()) is not None:
            lines.append(
                f"cost: at most {plural(chain[0], 'job')} of {self.slice_hours:.3g} h, {chain[1]:,.0f} node-hours, "
                f"if steps take as long as predicted"
            )
        if max_node_hours is not None:
            lines.append(f"cost: the run saves and ends when {max_node_hours:,.1f} node-hours are used")
        elif self.chained:
            lines.append(
                "cost: no limit of node-hours is set (--max-node-hours, or job.max_node_hours=H after a script)"
            )
        return "\n".join(lines)


def _minutes(seconds: float) -> str:
    """Format a duration of a job: '687 minutes', or seconds below two minutes."""
    return f"{seconds / 60:,.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def cost_of(request: submit.JobRequest) -> Cost:
    """Return the predicted cost of the remaining steps of a run."""
    job = request.job
    return Cost(
        config=request.config,
        directory=job.directory,
        done=run_dir.latest_step(job.directory),
        step_s=request.step_s,
        nodes=job.all_nodes,
        slice_hours=request.slice_minutes / 60 if request.slice_minutes else None,
        warning_s=job.warning_s,
        chained=job.continuation != "never",
    )


def compare_nodes(request: submit.JobRequest, node_counts: Sequence[int]) -> str:
    """Return a table of the same run on other node counts: steps, jobs, days, node-hours and time in the queue.

    For a node count on which the layout is not legal, the text gives the reason instead of a row.
    """
    rows = []
    refused = []
    for nodes in sorted({request.job.nodes, *node_counts}):
        devices = nodes * request.tasks_per_node
        if found := plan_problems(request.config, devices):
            refused.append(f"{plural(nodes, 'node')}: {found[0]}")
            continue
        job = replace(request.job, nodes=nodes)
        other = replace(request, job=job).with_prediction(predict(request.config, devices, request.site.machine))
        cost = cost_of(other)
        chain = cost.chain()
        jobs = chain[0] if chain else 1
        charged = (cost.hours + jobs * START_S / 3600) * cost.nodes
        wait_h = request.site.queue_wait_hours(job.all_nodes)
        wait = "unknown" if wait_h is None else f"{jobs * wait_h / 24:,.1f}"
        rows.append((nodes, f"{cost.step_s:.3g}", jobs, f"{cost.days:,.1f}", f"{charged:,.0f}", wait))
    head = (">nodes", ">s/step", ">jobs", ">days", ">node-hours", ">days in the queue")
    return "\n".join([aligned(head, rows), *refused])


def written(config: RunConfig, saves: int, directory: Path) -> str:
    """Return a text about the size of `saves` checkpoints and the place of checkpoints and logs."""
    if not saves:
        return f"no checkpoint (0 bytes), only logs and metrics, to {directory}"
    one_bytes = state_bytes(config.model, config.optimizer.name, config.precision.dtype)
    kept = min(saves, config.train.keep_checkpoints)
    return (
        f"{format_bytes(saves * one_bytes)}, {plural(saves, 'checkpoint')} of {format_bytes(one_bytes)}, to "
        f"{directory / 'checkpoints'}, "
        f"and keeps {kept} (train.keep_checkpoints)"
    )


def with_prediction(request: submit.JobRequest) -> submit.JobRequest:
    """Return the request with the planner's step time. Unchanged if the layout is not legal on the job's nodes."""
    if any(submit.layout_problems(request)):
        return request
    devices = request.job.nodes * request.tasks_per_node
    return request.with_prediction(predict(request.config, devices, request.site.machine))


def admit(request: submit.JobRequest) -> submit.JobRequest:
    """Return the request with the planner's step time. Raises ConfigError with all problems of the request.

    The sections of a certificate use the same rules: `cost_problems` and `saving_problems`.
    `cluster.readiness` checks the installation at the site, the data and the run directory.
    """
    problems = list(submit.layout_problems(request))
    if not problems:
        devices = request.job.nodes * request.tasks_per_node
        predicted = predict(request.config, devices, request.site.machine)
        request = request.with_prediction(predicted)
        problems += predicted.memory_problems()
    if problems := [*cost_problems(request), *saving_problems(request), *problems]:
        raise ConfigError(problems)
    return request


def cost_problems(request: submit.JobRequest) -> Iterator[Problem]:
    """Yield the problems for which the site, Slurm or the cost rules would refuse the job.

    The cost rules are checked only if the request has a predicted step time.
    """
    yield from submit.job_problems(request)
    if request.step_s:
        cost = cost_of(request)
        yield from synthetic_problems(request.config, cost)
        yield from end_problems(request)
        yield from budget_problems(request, cost)


def saving_problems(request: submit.JobRequest) -> Iterator[Problem]:
    """Yield the reasons why work of the run would be lost: no saves, or too little time for training and saves."""
    yield from submit.walltime_problems(request)
    if not request.saves:
        return
    yield from unsaved_problems(request.config)
    if request.step_s:
        yield from unfinished_problems(request, cost_of(request))


def end_problems(request: submit.JobRequest) -> Iterator[Problem]:
    """Yield a problem if the supervisor would end the job at its start: the run is finished, or STOP exists."""
    if request.is_running:  # the supervisor decides with the same function
        return
    job = replace(request.job, max_node_hours=None)  # see budget_problems
    history = History(
        target_step=request.config.train.steps,
        saves_final=request.config.train.save_final,
        saved_step=run_dir.latest_step(job.directory),
        last=run_dir.last_attempt(job.directory),
    )
    if reason := reason_to_end(job, history, stop_requested=(job.directory / run_dir.STOP_FILE).exists()):
        fix = ""
        if history.saved_step >= history.target_step:
            fix = "set a larger train.steps and --allow-change train.steps, or another train.run_dir"
        elif reason.startswith("finished"):  # without a checkpoint from which more steps could follow
            fix = "set train.save_final=true, or another train.run_dir"
        yield Problem("train.run_dir", f"a job would end at its start, because the run is {reason}", fix)


def budget_problems(request: submit.JobRequest, cost: Cost) -> Iterator[Problem]:
    """Yield a problem if the budget does not suffice for the start, one step, and the warning time (for the save)."""
    budget = request.job.max_node_hours
    if budget is None or not cost.steps:
        return
    used = 0.0 if request.is_running else slurm.used_node_hours(request.job.directory)
    least = (START_S + cost.step_s + cost.warning_s) / 3600 * cost.nodes
    if budget - used < least:
        left = f"{budget - used:g} of {budget:g} node-hours are left, which" if used else f"{budget:g} node-hours"
        what = f"{left} are too few: the start, one step and a save take about {least:,.1f} (predicted)"
        yield Problem("--max-node-hours", what, f"--max-node-hours {used + 2 * least:.0f} or more")


def unsaved_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if the run writes no checkpoint and is more than a short benchmark on synthetic data."""
    steps = config.train.steps
    is_synthetic = all(phase.config.data.train == "synthetic" for phase in phases_of(config))
    if not saves_nothing(config.train) or (is_synthetic and steps <= UNSAVED_STEPS):
        return
    data = "synthetic data" if is_synthetic else "your own data"
    what = (
        f"no checkpoint is written in {plural(steps, 'step')} on {data} "
        f"(save_interval={config.train.save_interval}, save_final=false)"
    )
    fix = f"set train.save_final=true and train.save_interval=N, or run at most {UNSAVED_STEPS} steps on synthetic data"
    if production := PRODUCTION.get(config.model.name):
        fix = f"start slurm/{production}.sbatch (configs/runs/{production}.yaml), which saves; or {fix}"
    yield Problem("train.save_final", what, fix)


def unfinished_problems(request: submit.JobRequest, cost: Cost) -> Iterator[Problem]:
    """Yield a problem if the run saves nothing and does not fit into one job."""
    if not saves_nothing(request.config.train) or cost.job_steps == cost.steps:
        return
    minutes = math.ceil((START_S + cost.steps * cost.step_s + cost.warning_s) / 60)
    what = (
        f"{60 * (cost.slice_hours or 0):.0f} minutes are too short: {plural(cost.steps, 'step')} and the start take "
        f"about {minutes} minutes (predicted), and nothing is saved"
    )
    yield Problem("--time", what, f"{submit.more_time(request, minutes)}; or fewer train.steps")


def synthetic_problems(config: RunConfig, cost: Cost) -> Iterator[Problem]:
    """Yield a problem if a run on synthetic data is long and costly."""
    if config.data.train != "synthetic" or config.data.allow_synthetic or config.train.steps <= BENCHMARK_STEPS:
        return
    if cost.node_hours > CHEAP_NODE_HOURS:
        what = (
            f"{config.train.steps} steps on synthetic data take about {cost.node_hours:,.0f} node-hours, and the "
            f"model learns nothing"
        )
        fix = (
            f"set data.train=[{{path: PREFIX}}], or at most train.steps={BENCHMARK_STEPS} for a benchmark, or "
            f"data.allow_synthetic=true"
        )
        yield Problem("data.train", what, fix)


def advice(request: submit.JobRequest) -> Iterator[str]:
    """Yield warnings about a request that is not refused."""
    config = request.config
    checkpoint_bytes = state_bytes(config.model, config.optimizer.name, config.precision.dtype)
    precision = fp16_note(config.precision, load_machine(request.site.machine).device.flushes_fp16)
    found = [
        scratch_note(request),
        start_note(request),
        device_note(request),
        quota_note(request, checkpoint_bytes),
        precision,
    ]
    yield from filter(None, found)


def scratch_note(request: submit.JobRequest) -> str:
    """Return a warning if the run directory is not on the site's scratch file system.

    Return '' if the run directory is there, or if the scratch directory is unknown.
    """
    scratch = request.site.scratch_dir(request.account or "", environ("USER") or "")
    directory = request.job.directory
    if scratch is None or directory.is_relative_to(scratch):
        return ""
    fix = f"set train.run_dir={scratch / directory.name}"
    return f"the run directory {directory} is not on {scratch}, which the site provides for checkpoints; {fix}"


def quota_note(request: submit.JobRequest, checkpoint_bytes: float) -> str:
    """Return a warning if the checkpoints that exist at the same time approach the project's quota. '' otherwise.

    statvfs reports the complete file system, so it does not show the quota.
    """
    train = request.config.train
    quota_tb = request.site.scratch_quota_tb
    if quota_tb is None or not request.saves or saves_nothing(train):
        return ""
    forever = train.steps // train.keep_every if train.keep_every else 0
    # + 1: the checkpoint that is being written
    held_tb = (forever + train.keep_checkpoints + 1) * checkpoint_bytes / 1e12
    if held_tb <= 0.8 * quota_tb:  # 20 % of the quota are left for data, logs and other runs
        return ""
    return (
        f"up to {forever + train.keep_checkpoints + 1} checkpoints of {checkpoint_bytes / 1e12:.1f} TB exist at the "
        f"same time, {held_tb:.0f} TB in total; the scratch quota of a project on {request.site.name} is "
        f"{quota_tb:.0f} TB unless the site has raised it. Lower train.keep_checkpoints or raise train.keep_every "
        "to store less"
    )


def start_note(request: submit.JobRequest) -> str:
    """Return a warning if the ranks of many nodes would all import torch from the shared file system. '' otherwise."""
    if not submit.imports_from_shared_files(request) or request.job.all_nodes <= MANY_NODES:
        return ""
    limit = ""
    if request.job.all_nodes > submit.SHARED_IMPORT_NODES:
        limit = f"; on {request.site.name}, submit refuses this for more than {submit.SHARED_IMPORT_NODES} nodes"
    return (
        f"{request.job.all_nodes} nodes will import torch from {environ('FRONTIER_LLM_PYTHON') or sys.executable}, "
        "which can be slow: on Frontier, 8 nodes took 51 s from Orion, 4 min from NFS and 2 s from their own disks. "
        f"Export FRONTIER_LLM_ENV_ARCHIVE=ENV.tar.gz (docs/frontier.md, section 1) or FRONTIER_LLM_CONTAINER{limit}"
    )


def device_note(request: submit.JobRequest) -> str:
    """Return a warning if the ranks of a site with GPUs would compute on CPUs or in fp32 or fp64. '' otherwise.

    Such settings are often left over from a local test.
    """
    dtype = request.config.precision.dtype
    if request.site.bind != "gcd":
        return ""
    if request.config.train.device == "cpu":
        return (
            f"train.device=cpu leaves the GPUs of {request.site.name} idle, and the job is charged for them; remove "
            f"the key, or set train.device=auto"
        )
    if dtype in ("fp32", "fp64"):  # matrix peak of the MI250X: 95.7 TFLOP/s in both, 383 in bf16 (AMD)
        return (
            f"precision.dtype={dtype} has a quarter of the matrix rate of bf16 on {request.site.name}, and needs "
            f"more memory for activations; set precision.dtype=bf16"
        )
    return ""


def admit_job(run: BatchRun) -> None:
    """Run the checks of `submit` at the start of a job that sbatch has queued, and log the cost of the job. Raises
    ConfigError.

    Account, partition and walltime are not checked, because Slurm has already accepted them.
    """
    job = run.job
    left_s = slurm.time_left_s(run.allocation.job_id)
    request = admit(
        submit.JobRequest(
            job=job,
            config=run.config,
            site=run.site,
            partition=environ("SLURM_JOB_PARTITION"),
            qos=environ("SLURM_JOB_QOS"),
            job_tasks_per_node=run.allocation.tasks_per_node,
        )
    )
    cost = replace(cost_of(request), slice_hours=None if left_s is None else left_s / 3600)
    log.info(cost.describe(job.max_node_hours))
    if not saves_nothing(run.config.train) and job.warning_s < request.step_s:
        log.warn(
            f"the last save may not end in time: ranks are warned {job.warning_s:.0f} s before the end of the "
            f"walltime, but a step takes about {request.step_s:.0f} s (predicted). "
            "Raise sbatch --signal=USR1@N and job.warning_s=N"
        )
    for note in advice(request):
        log.warn(note)


def admit_start(run: BatchRun) -> None:
    """Run all checks of `submit` in the batch shell, before the first srun. Raises FrontierError."""
    admit_job(run)
    refuse_unready(run)
