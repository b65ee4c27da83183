"""Short runs one after another, each within a time limit: as srun steps over nodes of this allocation, or as ranks
of this machine.
"""

from __future__ import annotations

import math
import os
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
from frontier_llm.config import RunConfig, load_run
from frontier_llm.errors import FrontierError
from frontier_llm.experiments.scaling.harvest import step_times_s
from frontier_llm.files import open_below
from frontier_llm.run import hostlist, run_dir
from frontier_llm.run.failure import REFUSED, STUCK, Evidence, Failure, read_failure
from frontier_llm.run.holder import reserved
from frontier_llm.run.job import Job, read_job, write_job
from frontier_llm.run.rank_env import environment, with_this_package
from frontier_llm.run.signals import EXIT_INTERRUPTED

OUT_OF_MEMORY = (
    "out of memory",
    "oom-kill",
    "oom_kill",
    "can't allocate memory",
    "cannot allocate memory",
    "memoryerror",
    "killed by sigkill",
)
GRACE_S = 30.0  # Slurm's KillWait: from SIGTERM to SIGKILL
# of every short run: nothing is saved, nobody waits for a hundred steps that are not finite
BARE = (
    "train.save_interval=0",
    "train.save_final=false",
    "train.eval_interval=0",
    "train.tensorboard=false",
    "data.validation=null",
)


@dataclass(frozen=True)
class ShortRun:
    """What to start."""

    words: tuple[str, ...]  # run file and overrides

    @cached_property
    def config(self) -> RunConfig:
        """What the words make."""
        return load_run(self.words[0], self.words[1:])

    @property
    def directory(self) -> Path:
        """Of the run, absolute."""
        return Path(self.config.train.run_dir).resolve()


@dataclass(frozen=True)
class RunEnd:
    """How a short run ended."""

    seconds: float  # of the whole start
    exit_code: int
    failure: Failure | None  # None: in order, or told to stop
    in_time: bool  # False: it was ended at its time limit

    @property
    def interrupted(self) -> bool:
        """Told to stop from outside, by the walltime or a person."""
        return self.in_time and self.failure is None and self.exit_code == EXIT_INTERRUPTED


class Launcher(Protocol):
    """Where short runs go."""

    nodes: int  # that one run takes
    devices: int

    def start(self, run: ShortRun, limit_s: float) -> RunEnd:
        """Run it; returns within the limit and a grace. Raises FrontierError where too few nodes are left."""

    def preflight(self, directory: Path) -> None:
        """Leave bad nodes out. Raises FrontierError when too few are left."""

    def time_left_s(self) -> float:
        """Until nothing can be started any more."""


class AllocationRanks:
    """srun steps over the healthy nodes of this allocation; nodes beyond `nodes` are spares."""

    def __init__(self, site: Site, nodes: int | None = None, spares: int = 0, warning_s: float | None = None) -> None:
        """`nodes` of the allocation at a time (None: all but the spares). Raises FrontierError outside a job, or in
        one too small.

        `warning_s`: time before the walltime at which Slurm warns the job (None: the site's).
        """
        self.allocation = slurm.Allocation.from_environment()
        # as many as it was queued with
        self.site = site.model_copy(update={"tasks_per_node": self.allocation.tasks_per_node})
        have = len(self.allocation.nodes)
        self.nodes = nodes or have - spares
        if not 0 < self.nodes <= have:
            raise FrontierError(
                f"{self.nodes} nodes wanted of an allocation of {have}", f"sbatch --nodes={self.nodes}", "--nodes"
            )
        self.devices = self.nodes * self.allocation.tasks_per_node
        self._warning_s = site.signal_lead_s if warning_s is None else warning_s
        self._failed: list[str] = []
        self._lent: set[str] = set()
        self._lock = threading.Lock()
        self._is_ready = False  # until the first run has found everything that it needs

    def preflight(self, directory: Path) -> None:
        """`doctor` on every node, once; bad ones are left out from then on. Raises FrontierError when too few are
        left, or all share a fault.
        """
        self._failed += preflight(self.site, directory, self.allocation.nodes, self.nodes)

    def _choose(self, count: int) -> tuple[str, ...]:
        bad = {*self._failed, *slurm.unhealthy(self.allocation.nodes)}
        usable = [node for node in self.allocation.nodes if node not in bad and node not in self._lent]
        if len(usable) < count:
            what = f"{len(usable)} of {len(self.allocation.nodes)} nodes are free and work, {count} are needed"
            raise FrontierError(
                what, f"more spares, or --exclude={hostlist.compress(sorted(bad))}" if bad else "", "nodes"
            )
        return tuple(usable[:count])

    @contextmanager
    def borrow(self, count: int) -> Iterator[tuple[str, ...]]:
        """So many healthy nodes that nobody else gets meanwhile. Raises FrontierError where too few are left."""
        with self._lock:
            nodes = self._choose(count)
            self._lent |= set(nodes)
        try:
            yield nodes
        finally:
            with self._lock:
                self._lent -= set(nodes)

    def start(self, run: ShortRun, limit_s: float) -> RunEnd:
        """One srun over as many healthy nodes as a run takes."""
        with self.borrow(self.nodes) as nodes:
            return self.start_on(nodes, run, limit_s)

    def start_on(self, nodes: tuple[str, ...], run: ShortRun, limit_s: float) -> RunEnd:
        """One srun over these nodes, recorded among the run's attempts. Raises FrontierError if something that ranks
        need is not installed.
        """
        # ranks that hang may not hear srun; Slurm itself ends the step then, a minute later
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
        """Of the job's walltime, until Slurm may warn the ranks; less what ending them takes."""
        left_s = slurm.time_left_s(self.allocation.job_id)
        return math.inf if left_s is None else left_s - self._warning_s - SLURM_EARLY_S - GRACE_S


@dataclass(frozen=True)
class ToolJob:
    """A job in which a command starts many short runs: a series or a search."""

    ranks: AllocationRanks
    job: Job
    overrides: tuple[str, ...]  # of every short run

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
    """The job of this allocation for a command that writes to `directory`.

    Raises FrontierError outside a job, in one that is too small, or if job.json there is damaged or of another run.
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
    """Ranks of this machine, without any scheduler; more nodes than one are only priced."""

    def __init__(self, devices: int, nodes: int = 1) -> None:
        self.devices = devices
        self.nodes = nodes

    def preflight(self, directory: Path) -> None:
        """Whoever sits at a machine knows it."""

    def start(self, run: ShortRun, limit_s: float) -> RunEnd:
        """As many ranks as devices; they die with the process that holds them."""
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
        """A machine of one's own has no walltime."""
        return math.inf


def judge(directory: Path, end: RunEnd) -> tuple[str, str]:
    """(ok, out of memory, hang, not finite, node failure, refused or crash; detail). `ok` needs one measured step,
    be it ended at its time limit.
    """
    rows = run_dir.steps(directory)
    failure = end.failure
    text = "\n".join([failure.what, *failure.message]) if failure else ""
    finite = [isinstance(row["loss"], int | float) and math.isfinite(row["loss"]) for row in rows]
    if "steps in a row were skipped" in text or (finite and not any(finite)):
        return "not finite", text[:200] or "no step had a finite loss"
    if any(mark in text.lower() for mark in OUT_OF_MEMORY):
        return "out of memory", text[-200:]
    if failure is not None and failure.cause == "node failure":
        return "node failure", failure.describe()
    if not end.in_time:
        if step_times_s(directory)[1:]:
            return "ok", f"{len(rows)} steps within the time limit"
        return "hang", f"nothing measured within {end.seconds:.0f} s"
    if failure is None:
        if rows and not end.exit_code:
            return "ok", ""
        return "crash", f"ended with {end.exit_code}"
    if end.exit_code == STUCK or "watchdog" in text.lower() or failure.evidence is Evidence.NOTICES:
        return "hang", failure.describe()
    if end.exit_code == REFUSED or failure.cause == "refused":
        return "refused", failure.describe()
    return "crash", failure.describe()
