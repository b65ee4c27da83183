"""Evaluates each checkpoint of a run beside the run: `frontier-llm evaluate RUN --follow`.

A result is a file `step_NNNNNNNN.json` in the folder of results. A checkpoint with a result is not evaluated again, so
a job that was killed or requeued continues. A checkpoint that the run deletes before its evaluation is left out.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from frontier_llm import log
from frontier_llm.cluster import slurm
from frontier_llm.cluster.attempt import JobStep, run_step
from frontier_llm.cluster.batch import BatchRun
from frontier_llm.cluster.sites import Site
from frontier_llm.config import RunConfig
from frontier_llm.errors import FrontierError
from frontier_llm.run.complete import fault, step_name
from frontier_llm.run.evaluations import next_step, result_path
from frontier_llm.run.holder import jobs, living_holder
from frontier_llm.run.job import Job
from frontier_llm.run.rank_env import COMMAND, environment, with_this_package

POLL_S = 60.0
ENDING_S = 90.0  # part of the walltime in which no evaluation runs, for the requeue
FAILURES = 3  # failed evaluations that end the command


class Evaluator(Protocol):
    """Evaluates one checkpoint."""

    def evaluate(self, checkpoint: Path, output: Path) -> int:
        """Write the result to `output`. Return the exit code."""

    def time_left_s(self) -> float:
        """Return the seconds that are left for evaluations."""


def is_running(directory: Path) -> bool:
    """Whether a process trains in the run directory, or a job of the run is queued.

    True also if the Slurm controller does not respond.
    """
    if living_holder(directory) is not None:
        return True
    try:
        return any(slurm.is_active(job_id) for job_id in jobs(directory))
    except slurm.ControllerAway:
        return True
    except FrontierError as error:
        log.warn(f"the jobs of the run are unknown: {error}")
        return False


class WalltimeReached(Exception):
    """The walltime left is too short for another evaluation. The next job continues."""


class Follower:
    """Evaluates the checkpoints of one run."""

    def __init__(self, directory: Path, results: Path, evaluator: Evaluator) -> None:
        """`directory` is the run directory. `results` is created."""
        self._directory = directory
        self._results = results
        self._evaluator = evaluator
        self._failed: list[int] = []  # steps; they are not tried again by this process
        self._longest_s = 0.0  # longest evaluation so far
        self._is_first = True  # no evaluation and no wait so far
        results.mkdir(parents=True, exist_ok=True)

    def run(self, poll_s: float = POLL_S) -> None:
        """Evaluate each checkpoint that has no result, newest first, until the run has ended.

        Raises WalltimeReached. Raises FrontierError at the end if evaluations failed, or at once after FAILURES failed
        evaluations.
        """
        while True:
            is_last_look = not is_running(self._directory)  # asked first, so that the look includes the last checkpoint
            while (step := next_step(self._directory, self._results, self._failed)) is not None:
                self._evaluate(step)
            if self._failed and is_last_look:
                self._refuse()
            if is_last_look:
                return
            if self._evaluator.time_left_s() <= max(self._longest_s, poll_s):
                raise WalltimeReached
            self._is_first = False
            time.sleep(poll_s)

    def _evaluate(self, step: int) -> None:
        if self._evaluator.time_left_s() <= self._longest_s:
            raise WalltimeReached
        checkpoint = self._directory / "checkpoints" / step_name(step)
        log.info(f"evaluating {checkpoint}")
        began_s = time.monotonic()
        code = self._evaluator.evaluate(checkpoint, result_path(self._results, step))
        self._longest_s = max(self._longest_s, time.monotonic() - began_s)
        if result_path(self._results, step).exists():
            self._is_first = False
            return
        if self._evaluator.time_left_s() <= 0:
            if not self._is_first:
                raise WalltimeReached
            fix = "submit it with a longer --time or more nodes, or evaluate less with --windows and --limit"
            raise FrontierError("cannot be evaluated within the walltime of one job", fix, str(checkpoint))
        if fault(checkpoint) is not None:
            log.info(f"{checkpoint.name} was deleted by the run before its evaluation ended")
            return
        log.warn(f"the evaluation of {checkpoint.name} ended with exit code {code}")
        self._failed.append(step)
        if len(self._failed) >= FAILURES:
            self._refuse()

    def _refuse(self) -> None:
        steps = ", ".join(f"{step:,}" for step in self._failed)
        fix = "see the messages above; a later start tries them again"
        raise FrontierError(f"not evaluated: steps {steps}", fix, str(self._directory))


@dataclass(frozen=True)
class LocalEvaluator:
    """Runs `frontier-llm evaluate` on this computer."""

    words: tuple[str, ...]  # arguments of `evaluate` after the checkpoint

    def evaluate(self, checkpoint: Path, output: Path) -> int:
        """Write the result to `output`. Return the exit code."""
        command = [sys.executable, *evaluate_command(checkpoint, self.words, output)]
        variables = with_this_package(environment())
        return subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, check=False).returncode  # noqa: S603

    def time_left_s(self) -> float:
        """Return infinity: a local computer has no walltime."""
        return math.inf


@dataclass(frozen=True)
class SlurmEvaluator:
    """Runs `frontier-llm evaluate` with one srun over all nodes of this job, one rank per task of a node."""

    words: tuple[str, ...]  # arguments of `evaluate` after the checkpoint
    config: RunConfig  # configuration of the run; determines the variables of the ranks
    site: Site
    allocation: slurm.Allocation

    def evaluate(self, checkpoint: Path, output: Path) -> int:
        """Write the result to `output`. Return the exit code. The ranks' logs are deleted after a success."""
        nodes = self.allocation.nodes
        results = output.parent
        job = Job(run_dir=str(results), words=(), site=self.site.name, nodes=len(nodes), warning_s=0.0)
        run = BatchRun(
            job=job,
            config=self.config,
            site=self.site,
            allocation=self.allocation,
            program=evaluate_command(checkpoint, self.words, output),
        )
        log_dir = results / "logs" / checkpoint.name
        left_s = self.time_left_s()
        deadline_s = left_s if math.isfinite(left_s) else None
        outcome = run_step(JobStep(run, nodes, log_dir, {}, deadline_s))
        if outcome.exit_code == 0:
            shutil.rmtree(log_dir, ignore_errors=True)
        return outcome.exit_code

    def time_left_s(self) -> float:
        """Return the seconds until the end of the walltime, without the time for a requeue."""
        left_s = slurm.time_left_s(self.allocation.job_id)
        return math.inf if left_s is None else left_s - ENDING_S


def evaluate_command(checkpoint: Path, words: Sequence[str], output: Path) -> tuple[str, ...]:
    """Return the arguments of the Python interpreter that evaluate one checkpoint."""
    return (*COMMAND, "evaluate", str(checkpoint), *words, "--output", str(output))
