"""Evaluates each checkpoint of a run while the run trains: `frontier-llm evaluate RUN --follow`.

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
from frontier_llm.cluster.decide import SLURM_EARLY_S
from frontier_llm.cluster.sbatch import BENCHMARK_WARNING_S
from frontier_llm.cluster.sites import Site
from frontier_llm.config import load_run
from frontier_llm.errors import ConfigError, FrontierError, closest
from frontier_llm.run.allocations import allocations
from frontier_llm.run.complete import MANIFEST, fault, step_name
from frontier_llm.run.evaluations import next_step, result_path
from frontier_llm.run.holder import jobs, living_holder
from frontier_llm.run.rank_env import COMMAND, environment, with_this_package
from frontier_llm.run.run_dir import share_with_group

POLL_S = 60.0
START_LIMIT_S = 300.0  # time within which a run has to start if none of its jobs or processes is known.
# Last part of the walltime, in which no evaluation runs. It is the sum of the warning time, the time by which Slurm may
# signal too early, and 30 s in which the ranks of an evaluation end.
ENDING_S = BENCHMARK_WARNING_S + SLURM_EARLY_S + 30.0
FAILURES = 3  # number of failed evaluations after which the command ends


class Evaluator(Protocol):
    """Evaluates one checkpoint."""

    def evaluate(self, checkpoint: Path, output: Path) -> int:
        """Write the result to `output`. Return the exit code."""

    def time_left_s(self) -> float:
        """Return the seconds that are left for evaluations."""


def is_running(directory: Path) -> bool:
    """Return whether a process trains in the run directory, or a job of the run is queued or prepares its start.

    True also if the Slurm controller does not respond.
    """
    if living_holder(directory) is not None:
        return True
    try:
        allocated = [allocation.job_id for allocation in allocations(directory)[-1:]]
        return any(slurm.is_active(job_id) for job_id in {*jobs(directory), *allocated})
    except slurm.ControllerAway:
        return True
    except FrontierError as error:
        log.warn(f"the jobs of the run are unknown: {error}")
        return False


class WalltimeReached(Exception):
    """The remaining walltime is too short for another evaluation. The next job continues."""


class Follower:
    """Evaluates the checkpoints of one run."""

    def __init__(self, directory: Path, results: Path, evaluator: Evaluator) -> None:
        """`directory` is the run directory. `results` is created when the run has started."""
        self._directory = directory
        self._results = results
        self._evaluator = evaluator
        self._failed: list[int] = []  # steps whose evaluation failed; this process does not try them again
        self._longest_s = 0.0  # seconds of the longest evaluation so far
        self._is_first = True  # True until the first evaluation or the first wait

    def run(self, poll_s: float = POLL_S) -> None:
        """Wait for the start of the run. Evaluate each checkpoint that has no result, newest first, until it has ended.

        Raises WalltimeReached. Raises ConfigError if the run does not start. Raises FrontierError at the end if
        evaluations failed, or after FAILURES of them.
        """
        self._wait_for_start(poll_s)
        share_with_group(self._directory)
        self._results.mkdir(parents=True, exist_ok=True)
        while True:
            # called before the checkpoints are listed, so that the list includes the last checkpoint
            is_last_look = not is_running(self._directory)
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

    def _wait_for_start(self, poll_s: float) -> None:
        """Wait until the run has written its checkpoint folder and its configuration.

        A run writes the folder after the rendezvous, and the configuration after it has loaded its checkpoint.
        """
        checkpoints = self._directory / "checkpoints"
        began_s = time.monotonic()
        while True:
            # called before the files are listed, so that the list includes the last files
            is_expected = is_running(self._directory)
            if checkpoints.is_dir() and (self._directory / "config.yaml").is_file():
                return
            is_over = time.monotonic() - began_s >= START_LIMIT_S
            if not is_expected and (is_over or self._is_model()):
                if checkpoints.is_dir():  # the run was imported and never started
                    return
                fix = "give the directory of a run; a job can wait for its job with sbatch --dependency=after:JOB"
                raise ConfigError("is not the directory of a run that starts", fix, str(self._directory.absolute()))
            if not is_expected and (near := self._similar_run()):
                raise ConfigError("does not exist", f"did you mean {near}?", str(self._directory.absolute()))
            if self._is_first:
                log.info(
                    f"no run is known in {self._directory.absolute()}: waiting until one starts, at most "
                    f"{START_LIMIT_S / 60:.0f} minutes unless a job of the run is queued"
                )
            if self._evaluator.time_left_s() <= poll_s:
                raise WalltimeReached
            self._is_first = False
            time.sleep(poll_s)

    def _similar_run(self) -> Path | None:
        """Return a run with a similar name beside a directory that does not exist. None if there is none."""
        if self._directory.exists():
            return None
        beside = self._directory.parent
        name = closest(self._directory.name, [path.parent.name for path in beside.glob("*/checkpoints")])
        return beside / name if name else None

    def _is_model(self) -> bool:
        """Return whether the directory is a checkpoint or a Hugging Face model, in which no run can start."""
        return any((self._directory / name).is_file() for name in (MANIFEST, "config.json"))

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
    directory: Path  # run directory; its configuration determines the variables of the ranks
    site: Site
    allocation: slurm.Allocation

    def evaluate(self, checkpoint: Path, output: Path) -> int:
        """Write the result to `output`. Return the exit code. The ranks' logs are deleted after a success."""
        results = output.parent
        log_dir = results / "logs" / checkpoint.name
        left_s = self.time_left_s()
        step = JobStep(
            directory=results,
            command=evaluate_command(checkpoint, self.words, output),
            config=load_run(str(self.directory / "config.yaml"), [f"machine={self.site.machine}"]),
            site=self.site,
            allocation=self.allocation,
            nodes=self.allocation.nodes,
            log_dir=log_dir,
            variables={},
            deadline_s=left_s if math.isfinite(left_s) else None,
        )
        outcome = run_step(step)
        if outcome.exit_code == 0:
            shutil.rmtree(log_dir, ignore_errors=True)
        return outcome.exit_code

    def time_left_s(self) -> float:
        """Return the seconds until the end of the walltime, without the time for a requeue."""
        left_s = slurm.time_left_s(self.allocation.job_id)
        return math.inf if left_s is None else left_s - ENDING_S


def evaluate_command(checkpoint: Path, words: Sequence[str], output: Path) -> tuple[str, ...]:
    """Return the arguments with which the Python interpreter evaluates one checkpoint."""
    return (*COMMAND, "evaluate", str(checkpoint), *words, "--output", str(output))
