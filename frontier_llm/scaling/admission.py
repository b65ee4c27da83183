"""What a start on a site will cost, and what speaks against it: the same checks for `submit`, a bare `sbatch` and a series."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from frontier_llm import log
from frontier_llm.blueprint.optimizers import state_bytes
from frontier_llm.cluster import notes, run_dir, slurm, submit
from frontier_llm.cluster.job_spec import BatchJob
from frontier_llm.cluster.rank_env import environ
from frontier_llm.cluster.readiness import refuse_unready
from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError, Problem
from frontier_llm.machine import fp16_note, load_machine
from frontier_llm.scaling.predict import START_S, predict
from frontier_llm.topology import plan_problems
from frontier_llm.units import plural

BENCHMARK_STEPS = 100  # on synthetic data; more of them, when they cost more than CHEAP_NODE_HOURS, must be meant
CHEAP_NODE_HOURS = 10.0


@dataclass(frozen=True)
class Cost:
    """What is left of a run, as predicted."""

    steps: int  # until train.steps
    step_s: float
    nodes: int  # that Slurm charges, spares included
    slice_hours: float | None  # walltime of one job; None: the site states none
    lead_s: float  # of each job's end, for saving
    chained: bool  # whether a job that is not done is continued

    @property
    def hours(self) -> float:
        """Of training alone."""
        return self.steps * self.step_s / 3600

    @property
    def node_hours(self) -> float:
        """Of training alone."""
        return self.hours * self.nodes

    def chain(self) -> tuple[int, float] | None:
        """(jobs, node-hours) when every job uses its whole walltime; None where no walltime is known or it leaves no time to train."""
        if self.slice_hours is None or (trained_h := self.slice_hours - (START_S + self.lead_s) / 3600) <= 0:
            return None
        jobs = max(1, math.ceil(self.hours / trained_h)) if self.chained else 1
        return jobs, jobs * self.slice_hours * self.nodes

    def describe(self, max_node_hours: float | None) -> str:
        """One or two lines for the start of a job."""
        first = f"cost: {plural(self.steps, 'step')} of about {self.step_s:.3g} s (predicted) on {plural(self.nodes, 'node')}: "
        lines = [f"{first}{self.hours:,.1f} hours, {self.node_hours:,.1f} node-hours"]
        if (chain := self.chain()) is not None:
            lines.append(
                f"cost: at most {plural(chain[0], 'job')} of {self.slice_hours:.3g} h, {chain[1]:,.0f} node-hours, if steps are as predicted"
            )
        if max_node_hours is not None:
            lines.append(f"cost: the run saves and ends when {max_node_hours:,.1f} node-hours are used")
        elif self.chained:
            lines.append("cost: no limit is set (--max-node-hours, or FRONTIER_LLM_MAX_NODE_HOURS for sbatch)")
        return "\n".join(lines)


def cost_of(request: submit.JobRequest) -> Cost:
    """What the rest of a run is predicted to take."""
    left = max(0, request.config.train.steps - run_dir.latest_step(request.directory))
    hours = request.slice_minutes / 60 if request.slice_minutes else None
    return Cost(left, request.expected_step_s, request.all_nodes, hours, request.lead_s, request.continue_with != "never")


def admit(request: submit.JobRequest) -> submit.JobRequest:
    """The request with the planner's step time. Raises ConfigError with everything that would fail, or that nobody can have meant.

    What is installed at the site, data and run directory are `cluster.readiness`'.
    """
    devices = request.nodes * request.site.tasks_per_node
    problems = []
    if not plan_problems(request.config, devices):
        predicted = predict(request.config, devices, request.site.machine)
        request = replace(request, expected_step_s=predicted.step_time_s)
        problems = [*predicted.memory_problems(), *synthetic_problems(request.config, cost_of(request))]
    if problems := [*submit.problems(request), *problems]:
        raise ConfigError(problems)
    return request


def synthetic_problems(config: RunConfig, cost: Cost) -> Iterator[Problem]:
    """A long and costly run that would learn nothing."""
    if config.data.train != "synthetic" or config.data.allow_synthetic or config.train.steps <= BENCHMARK_STEPS:
        return
    if cost.node_hours > CHEAP_NODE_HOURS:
        what = f"{config.train.steps} steps on synthetic data, about {cost.node_hours:,.0f} node-hours, teach a model nothing"
        fix = f"data.train=[{{path: PREFIX}}], at most train.steps={BENCHMARK_STEPS} for a benchmark, or data.allow_synthetic=true"
        yield Problem("data.train", what, fix)


def advice(request: submit.JobRequest) -> Iterator[str]:
    """What the user should know and may want, beside what is refused."""
    config = request.config
    checkpoint_bytes = state_bytes(config.model, config.optimizer.name, config.precision.dtype)
    precision = fp16_note(config.precision, load_machine(request.site.machine).device.flushes_fp16)
    others = notes.scratch_note(request), notes.start_note(request), notes.device_note(request)
    yield from filter(None, (*others, notes.quota_note(request, checkpoint_bytes), precision))


def admit_job(job: BatchJob) -> None:
    """The checks of `submit` in the first seconds of a job that sbatch has queued; says what it may cost. Raises ConfigError.

    Slurm has accepted account, partition and walltime; a partition that the site file does not know has no limits to check.
    """
    partition = environ("SLURM_JOB_PARTITION")
    known = not job.site.partitions or partition in job.site.partitions
    left_s = slurm.time_left_s(job.allocation.job_id)
    request = admit(
        submit.JobRequest(
            config=job.config,
            site=job.site.model_copy(
                update={
                    "account": "optional",
                    "tasks_per_node": job.allocation.tasks_per_node,
                    "signal_lead_s": round(job.lead_s),
                    **({} if known else {"partitions": {}}),
                }
            ),
            nodes=job.nodes_needed,
            spares=job.spares,
            partition=partition if known else None,
            qos=environ("SLURM_JOB_QOS"),
            continue_with=job.continue_with,
        )
    )
    log.info(replace(cost_of(request), slice_hours=left_s and left_s / 3600, lead_s=job.lead_s).describe(job.max_node_hours))
    for note in advice(request):
        log.warn(note)


def admit_start(job: BatchJob) -> None:
    """All checks of `submit` in the batch shell, before the first srun. Raises FrontierError."""
    admit_job(job)
    refuse_unready(job)
