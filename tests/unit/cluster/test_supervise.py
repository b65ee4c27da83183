"""What the supervisor decides after each attempt, with Slurm and the ranks played by functions; on a real Slurm:
tests/slurm.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from frontier_llm.cluster import job as supervisor
from frontier_llm.cluster import slurm
from frontier_llm.cluster.attempt import Outcome
from frontier_llm.cluster.job import supervise
from frontier_llm.cluster.job_spec import BatchJob
from frontier_llm.cluster.sites import load_site
from frontier_llm.config import BatchConfig, RunConfig, TrainConfig, load_model
from frontier_llm.errors import FrontierError
from frontier_llm.run import run_dir
from frontier_llm.run.failure import Evidence, Failure
from tests.harness.checkpoints import save_only

Ending = Callable[[int], tuple[str, int]]  # number of the attempt → (cause, steps it did)


class Cluster:
    """A job on n0, n1 and n2 that uses two of them; an attempt ends as `ending` says."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, ending: Ending, walltime_s: float = 7200.0
    ) -> None:
        self.directory = directory
        self.ending = ending
        self.used = list[tuple[str, ...]]()
        self.requeued = 0
        answers = {
            "time_left_s": lambda job: walltime_s,
            "unhealthy": lambda nodes: [],
            "job_fields": lambda job: {},
            "requeue": self._requeue,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(slurm, name, answer)
        monkeypatch.setattr(supervisor, "attempt", self._attempt)
        monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: None)
        train = TrainConfig(run_dir=str(directory), steps=100)
        config = RunConfig(model=load_model("llama-tiny"), batch=BatchConfig(global_batch=8), train=train)
        allocation = slurm.Allocation("7", ("n0", "n1", "n2"), "n0", 1, 1)
        self.job = BatchJob(config, ("run.yaml",), directory, load_site("local"), allocation, spares=1)

    def _attempt(self, job: BatchJob, nodes: tuple[str, ...]) -> Outcome:
        self.used.append(nodes)
        start = run_dir.latest_step(self.directory)
        cause, steps = self.ending(len(self.used))
        save_only(self.directory, start + steps)
        run_dir.record(self.directory, run_dir.Attempt(len(self.used), "7", nodes, start, start + steps, 75, cause))
        return Outcome(75) if cause in ("interrupted", "finished") else Outcome(1, Failure("", Evidence.ENDS, cause))

    def _requeue(self, job: str) -> None:
        self.requeued += 1

    def run(self) -> int | str:
        """The supervisor's exit code; 'requeued' when Slurm would have ended it."""
        before = self.requeued
        try:
            return supervise(self.job)
        except FrontierError:
            if self.requeued > before:
                return "requeued"
            raise


def test_a_job_that_is_warned_at_its_start_is_not_requeued_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRONTIER_LLM_SIGNAL_LEAD_S", "120")  # while --signal=USR1@2010 is more than the walltime
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("interrupted", 0), walltime_s=1200)
    assert [cluster.run(), cluster.run()] == ["requeued", "requeued"]
    with pytest.raises(FrontierError, match="told to stop before they had saved a further step") as caught:
        cluster.run()
    assert "--signal=USR1@N" in str(caught.value) and "here 120 s" in str(caught.value)
    assert (len(cluster.used), cluster.requeued) == (3, 2)


def test_a_job_that_makes_progress_is_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("interrupted", 1))
    assert [cluster.run() for _ in range(5)] == ["requeued"] * 5


def test_a_walltime_shorter_than_the_warning_is_refused_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRONTIER_LLM_SIGNAL_LEAD_S", "2010")
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("interrupted", 1), walltime_s=1200)
    with pytest.raises(
        FrontierError, match="1200 s of walltime, but ranks are told to save 2010 s before its end"
    ) as caught:
        cluster.run()
    assert "sbatch --time=67" in str(caught.value) and cluster.used == [] and cluster.requeued == 0


def test_a_finished_run_does_not_ask_for_walltime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_only(tmp_path, 100)
    assert Cluster(tmp_path, monkeypatch, lambda number: ("crash", 0), walltime_s=1).run() == 0


def test_a_host_that_computes_wrongly_gives_way_to_the_spare_and_is_never_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ending(number: int) -> tuple[str, int]:
        if number == 1:
            run_dir.distrust(tmp_path, ["n1"])
        return ("wrong results", 1) if number == 1 else ("interrupted", 99)

    cluster = Cluster(tmp_path, monkeypatch, ending)
    assert cluster.run() == 0 and cluster.used == [("n0", "n1"), ("n0", "n2")]
    run_dir.distrust(tmp_path, ["n2"])
    save_only(tmp_path, 1)
    with pytest.raises(FrontierError, match=r"--exclude=n\[1-2\]"):  # not requeued, perhaps onto the same nodes
        cluster.run()
    assert len(cluster.used) == 2 and cluster.requeued == 0
