"""Starts short training runs, each within a time limit, for scaling series and tuning searches.

A run is an srun step over nodes of this Slurm allocation, or consists of ranks on this computer.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from frontier_llm.cluster import slurm
from frontier_llm.cluster.attempt import start_ranks
from frontier_llm.cluster.batch import TRAIN, BatchRun, make_job, settings_of_variables, split_settings
from frontier_llm.cluster.decide import SLURM_EARLY_S
from frontier_llm.cluster.doctor import preflight
from frontier_llm.cluster.readiness import refuse_unready
from frontier_llm.cluster.sites import Site
from frontier_llm.config import RunConfig
from frontier_llm.errors import NOT_FINITE, OUT_OF_MEMORY, REFUSED_CAUSE, FrontierError
from frontier_llm.experiments.scaling.harvest import step_times_s
from frontier_llm.files import open_below
from frontier_llm.machine.precision import load_resolved
from frontier_llm.run import hostlist, run_dir
from frontier_llm.run.failure import REFUSED, STUCK, Evidence, Failure, read_failure
from frontier_llm.run.holder import reserved
from frontier_llm.run.job import Job, read_job, write_job
from frontier_llm.run.rank_env import environment, with_this_package
from frontier_llm.run.signals import EXIT_INTERRUPTED

# messages of the kernel, Slurm, Python and torch if a host has no memory left
HOST_OUT_OF_MEMORY = re.compile(
    r"out of memory|oom[-_]kill|can't allocate memory|cannot allocate memory|MemoryError|SIGKILL", re.IGNORECASE
)
RCCL_WATCHDOG = "Watchdog caught collective operation timeout"  # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
GRACE_S = 30.0  # time between SIGTERM and SIGKILL, Slurm's KillWait.
# Settings of every short run: no saves, no evaluation, no TensorBoard
BARE = (
    "train.save_interval=0",
    "train.save_final=false",
    "train.eval_interval=0",
    "train.tensorboard=false",
    "data.validation=null",
    "train.remote=null",  # a short run must not write to the remote checkpoints of the run that it measures
)


@dataclass(frozen=True)
class ShortRun:
    """A short run, described by the arguments of `frontier-llm train`."""

    words: tuple[str, ...]  # run file and overrides

    @cached_property
    def config(self) -> RunConfig:
        """Configuration that the arguments describe."""
        return load_resolved(self.words[0], self.words[1:])

    @property
    def directory(self) -> Path:
        """Absolute path of the run directory."""
        return Path(self.config.train.run_dir).resolve()


@dataclass(frozen=True)
class RunEnd:
    """The end of a short run: exit code, seconds, failure."""

    seconds: float  # time from the start of the ranks to their end
    exit_code: int
    failure: Failure | None  # None if the run ended normally or was requested to stop
    in_time: bool  # False if the run was ended at its time limit

    @property
    def interrupted(self) -> bool:
        """True if the run was stopped from outside, by the walltime or by a user."""
        return self.in_time and self.failure is None and self.exit_code == EXIT_INTERRUPTED


class Launcher(Protocol):
    """Starts short runs."""

    nodes: int  # nodes that one run uses
    devices: int

    def start(self, run: ShortRun, limit_s: float) -> RunEnd:
        """Start a run and return when it has ended, at the latest at the limit plus a grace period.

        Raises FrontierError if too few nodes are left.
        """

    def preflight(self, directory: Path) -> None:
        """Check all nodes and exclude bad ones from later runs. Raises FrontierError if too few nodes are left."""

    def time_left_s(self) -> float:
        """Return the seconds that are left for further runs."""


class AllocationRanks:
    """Starts srun steps on `nodes` healthy nodes of this allocation. If one of them fails, another node of the
    allocation replaces it.
    """

    def __init__(self, site: Site, nodes: int | None = None, spares: int = 0, warning_s: float | None = None) -> None:
        """Use `nodes` nodes of the allocation at a time (None: all but the spares).

        `warning_s` is the time before the walltime at which Slurm warns the job (None: the site's value). Raises
        FrontierError outside a job, or if the job has too few nodes.
        """
        self.allocation = slurm.Allocation.from_environment()
        # use the job's number of ranks per node instead of the site's
        self.site = site.model_copy(update={"tasks_per_node": self.allocation.tasks_per_node})
        have = len(self.allocation.nodes)
        self.nodes = nodes or have - spares
        if not 0 < self.nodes <= have:
            raise FrontierError(
                f"is {self.nodes}, but the allocation has {have} nodes", f"sbatch --nodes={self.nodes}", "--nodes"
            )
        self.devices = self.nodes * self.allocation.tasks_per_node
        self._warning_s = site.warning_time_s if warning_s is None else warning_s
        self._failed: list[str] = []
        self._lent: set[str] = set()
        self._lock = threading.Lock()
        self._is_ready = False  # True after the first run has checked that all software that ranks need is installed

    def preflight(self, directory: Path) -> None:
        """Run `doctor` once on every node, and exclude bad nodes from all later runs.

        Raises FrontierError if too few nodes are left or if all nodes have the same fault.
        """
        self._failed += preflight(self.site, directory, self.allocation.nodes)
        self._choose(self.nodes)

    def _choose(self, count: int) -> tuple[str, ...]:
        bad = {*self._failed, *slurm.unhealthy(self.allocation.nodes)}
        usable = [node for node in self.allocation.nodes if node not in bad and node not in self._lent]
        if len(usable) < count:
            what = f"only {len(usable)} of {len(self.allocation.nodes)} nodes are free and healthy, {count} are needed"
            raise FrontierError(
                what,
                f"submit with more spares, or with --exclude={hostlist.compress(sorted(bad))}" if bad else "",
                "nodes",
            )
        return tuple(usable[:count])

    @contextmanager
    def borrow(self, count: int) -> Iterator[tuple[str, ...]]:
        """Reserve `count` healthy nodes for the caller. Raises FrontierError if too few nodes are left."""
        with self._lock:
            nodes = self._choose(count)
            self._lent |= set(nodes)
        try:
            yield nodes
        finally:
            with self._lock:
                self._lent -= set(nodes)

    def start(self, run: ShortRun, limit_s: float) -> RunEnd:
        """Start a run by one srun over `nodes` healthy nodes."""
        with self.borrow(self.nodes) as nodes:
            return self.start_on(nodes, run, limit_s)

    def start_on(self, nodes: tuple[str, ...], run: ShortRun, limit_s: float) -> RunEnd:
        """Start a run by one srun over these nodes and record it among the run's attempts.

        Raises FrontierError if something that ranks need is not installed.
        """
        # Ranks that hang may not react to srun. Slurm's own limit then ends the srun step within two minutes after
        # `limit_s`.
        site = self.site.model_copy(update={"srun": {**self.site.srun, "time": str(math.ceil(limit_s / 60) + 1)}})
        job = make_job(
            directory=run.directory,
            words=run.words,
            flags=(),
            site=site,
            allocated=len(nodes),
            settings={"continuation": "never"},
        )
        batch = BatchRun(job=job, config=run.config, site=site, allocation=self.allocation)
        with self._lock:
            if not self._is_ready:
                refuse_unready(batch)
                self._is_ready = True
        outcome, seconds = start_ranks(batch, nodes, limit_s, progress=lambda directory: len(run_dir.steps(directory)))
        in_time = outcome.cause != "walltime"
        failure = outcome.failure if in_time else read_failure(run.directory)
        if failure is not None and failure.host_suspect and failure.host in nodes:
            self._failed.append(failure.host)
        return RunEnd(seconds, outcome.exit_code, failure, in_time)

    def time_left_s(self) -> float:
        """Return the seconds until Slurm may warn the ranks, minus the time needed to end them."""
        left_s = slurm.time_left_s(self.allocation.job_id)
        return math.inf if left_s is None else left_s - self._warning_s - SLURM_EARLY_S - GRACE_S


@dataclass(frozen=True)
class ToolJob:
    """Slurm job in which one command starts many short runs: a scaling series or a tuning search."""

    ranks: AllocationRanks
    job: Job
    overrides: tuple[str, ...]  # overrides of every short run

    def record(self) -> None:
        """Write job.json into the command's directory."""
        with reserved(self.job.directory):
            write_job(self.job)


def open_tool_job(
    directory: Path,
    run: str,
    overrides: Sequence[str],
    *,
    site: Site,
    nodes: int | None = None,
    spares: int = 0,
    max_node_hours: float | None = None,
) -> ToolJob:
    """Return the job of this allocation for a command that writes to `directory`.

    Raises FrontierError outside a job, if the job is too small, or if job.json in `directory` is damaged or belongs to
    another run.
    """
    read_job(directory)
    typed, others = split_settings(overrides)
    settings = {"spares": spares, **settings_of_variables(("warning_s",), notice="warning_s" not in typed), **typed}
    if spares:
        settings["spares"] = spares
    ranks = AllocationRanks(site, nodes, settings["spares"], settings.get("warning_s"))
    own = (f"machine={site.machine}", *others)
    job = make_job(
        directory=directory,
        words=(run, *own),
        flags=(),
        site=site,
        allocated=ranks.nodes + settings["spares"],
        settings={**settings, "continuation": "never", "max_node_hours": max_node_hours},
    )
    return ToolJob(ranks=ranks, job=job, overrides=own)


class LocalRanks:
    """Launcher of ranks on this computer, without Slurm. `nodes` is used only for the cost of trials."""

    def __init__(self, devices: int, nodes: int = 1) -> None:
        self.devices = devices
        self.nodes = nodes

    def preflight(self, directory: Path) -> None:
        """Do nothing: a local computer is not checked."""

    def start(self, run: ShortRun, limit_s: float) -> RunEnd:
        """Start one rank per device. The ranks end with their parent process."""
        run.directory.mkdir(parents=True, exist_ok=True)
        began_s = time.monotonic()
        words = [sys.executable, *TRAIN, *run.words]
        with open(open_below(run.directory, "ranks.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as text:
            process = subprocess.Popen(  # noqa: S603 our own interpreter, no shell
                words, env=with_this_package(environment()), stdin=subprocess.DEVNULL, stdout=text, stderr=text
            )
            in_time = True
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                in_time = False
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
            finally:
                process.kill()
        code = process.wait()
        return RunEnd(time.monotonic() - began_s, code, read_failure(run.directory) if code else None, in_time)

    def time_left_s(self) -> float:
        """Return infinity: a local computer has no walltime."""
        return math.inf


def judge(directory: Path, end: RunEnd) -> tuple[str, str]:
    """Return (status, detail) of a short run that has ended.

    The status is ok, out of memory, hang, not finite, node failure, refused or crash. A run that reaches its time limit
    is ok if it has measured steps.
    """
    rows = run_dir.steps(directory)
    failure = end.failure
    cause = "" if failure is None else failure.cause
    text = "\n".join([failure.what, *failure.message]) if failure else ""
    finite = [isinstance(row["loss"], int | float) and math.isfinite(row["loss"]) for row in rows]
    if cause == NOT_FINITE or (finite and not any(finite)):
        return "not finite", text[:200] or "no step had a finite loss"
    if cause == OUT_OF_MEMORY or HOST_OUT_OF_MEMORY.search(text):
        return "out of memory", text[-200:]
    if failure is not None and cause == "node failure":
        return "node failure", failure.describe()
    if not end.in_time:
        if step_times_s(directory)[1:]:
            return "ok", f"{len(rows)} steps within the time limit"
        return "hang", f"nothing measured within {end.seconds:.0f} s"
    if failure is None:
        if rows and not end.exit_code:
            return "ok", ""
        return "crash", f"ended with exit code {end.exit_code}"
    if end.exit_code == STUCK or failure.evidence is Evidence.NOTICES or RCCL_WATCHDOG in text:
        return "hang", failure.describe()
    if end.exit_code == REFUSED or cause == REFUSED_CAUSE:
        return "refused", failure.describe()
    return "crash", failure.describe()
