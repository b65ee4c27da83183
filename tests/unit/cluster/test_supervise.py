"""The code that calls `decide`: the records that it reads, and how it executes decisions. Functions replace Slurm and
the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from frontier_llm.cluster import slurm, supervisor
from frontier_llm.cluster.attempt import Outcome
from frontier_llm.cluster.batch import BatchRun
from frontier_llm.cluster.notices import Notifier
from frontier_llm.cluster.sites import load_site
from frontier_llm.cluster.supervisor import record_switch, supervise
from frontier_llm.config import BatchConfig, RunConfig, TrainConfig, load_model
from frontier_llm.errors import FrontierError
from frontier_llm.run import allocations, run_dir
from frontier_llm.run.failure import Evidence, Failure, read_failure
from frontier_llm.run.job import Job, read_job, write_job
from tests.harness.checkpoints import save_only

Ending = Callable[[int], tuple[str, int]]  # number of the attempt → (cause, steps done)


class Cluster:
    """A job on n0, n1 and n2 that uses two of them. `ending` defines how an attempt ends."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, ending: Ending, walltime_s: float = 7200.0
    ) -> None:
        self.directory = directory
        self.ending = ending
        self.walltime_s = walltime_s
        self.used = list[tuple[str, ...]]()
        self.requeued = 0
        self.asked = list[str]()
        answers = {
            "time_left_s": self._time_left_s,
            "node_health": self._node_health,
            "billed_node_hours": self._billed_node_hours,
            "job_fields": lambda job, patience_s=0.0: {},
            "requeue": self._requeue,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(slurm, name, answer)
        monkeypatch.setattr(supervisor, "start_ranks", self._start_ranks)
        monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: None)
        train = TrainConfig(run_dir=str(directory), steps=100)
        config = RunConfig(model=load_model("llama-tiny"), batch=BatchConfig(global_batch=8), train=train)
        job = Job(run_dir=str(directory), words=("run.yaml",), site="local", nodes=2, spares=1, warning_s=120.0)
        allocation = slurm.Allocation("7", ("n0", "n1", "n2"), "n0", 1, 1)
        self.run = BatchRun(job=job, config=config, site=load_site("local"), allocation=allocation)

    def _node_health(self, nodes: tuple[str, ...]) -> slurm.NodeHealth:
        self.asked.append("node_health")
        return slurm.NodeHealth()

    def _time_left_s(self, job: str) -> float:
        self.asked.append("time_left_s")
        return self.walltime_s

    def _billed_node_hours(self, job_ids: list[str]) -> dict[str, float]:
        if job_ids:
            self.asked.append("sacct")
        return {}

    def _start_ranks(
        self, run: BatchRun, nodes: tuple[str, ...], deadline_s: float, save_after_s: float
    ) -> tuple[Outcome, float]:
        self.used.append(nodes)
        start = run_dir.latest_step(self.directory)
        cause, steps = self.ending(len(self.used))
        save_only(self.directory, start + steps)
        run_dir.record(self.directory, run_dir.Attempt(len(self.used), "7", nodes, start, start + steps, 75, cause))
        if cause in ("interrupted", "finished"):
            return Outcome(75), 1.0
        return Outcome(1, Failure("planted", Evidence.ENDS, cause)), 1.0

    def _requeue(self, job: str) -> None:
        self.requeued += 1

    def supervise(self) -> int | str:
        """Return the supervisor's exit code, or 'requeued' if Slurm would have ended it."""
        before = self.requeued
        try:
            return supervise(self.run)
        except FrontierError:
            if self.requeued > before:
                return "requeued"
            raise


def test_starts_of_earlier_jobs_count_as_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each requeued job starts the ranks once. The third job gives the run up."""
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("interrupted", 0))
    assert [cluster.supervise() for _ in range(3)] == ["requeued", "requeued", 2]
    assert (len(cluster.used), cluster.requeued) == (3, 2)


def test_a_finished_run_does_not_wait_for_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_only(tmp_path, 100)
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("crash", 0), walltime_s=1)
    assert cluster.supervise() == 0 and cluster.asked == cluster.used == []


@pytest.mark.parametrize("budget", [None, 100.0])
def test_a_job_whose_walltime_ends_is_requeued_without_a_command_of_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float | None
) -> None:
    """Each command can take longer than the time that is left."""
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("walltime", 1))
    cluster.run = replace(cluster.run, job=replace(cluster.run.job, max_node_hours=budget))
    assert cluster.supervise() == "requeued"
    before = ["node_health", "time_left_s"] if budget is None else ["sacct", "node_health", "time_left_s"]
    assert cluster.asked == before * 2  # before the checks of the run, and before the start of the ranks


def test_a_short_walltime_is_refused_after_the_checks_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("interrupted", 1), walltime_s=100)
    admitted = list[BatchRun]()
    assert supervise(cluster.run, admitted.append) == 2
    assert admitted == [cluster.run] and cluster.used == []
    assert "only 100 s are left" in capsys.readouterr().err


def test_a_host_that_computes_wrongly_gives_way_to_the_spare_and_is_never_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ending(number: int) -> tuple[str, int]:
        if number == 1:
            run_dir.distrust(tmp_path, ["n1"])
        return ("wrong results", 1) if number == 1 else ("interrupted", 99)

    cluster = Cluster(tmp_path, monkeypatch, ending)
    assert cluster.supervise() == 0 and cluster.used == [("n0", "n1"), ("n0", "n2")]
    failure = read_failure(tmp_path)
    assert failure is not None and failure.what == "planted"
    run_dir.distrust(tmp_path, ["n2"])
    save_only(tmp_path, 1)
    # the job is not requeued, because it could get the same nodes
    with pytest.raises(FrontierError, match=r"--exclude=n\[1-2\]"):
        cluster.supervise()
    assert len(cluster.used) == 2 and cluster.requeued == 0


def test_hosts_to_avoid_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("interrupted", 100))
    monkeypatch.setattr(slurm, "node_health", lambda nodes: slurm.NodeHealth(failed=("n1",)))
    assert cluster.supervise() == 0 and cluster.used == [("n0", "n2")]
    assert run_dir.bad_hosts(tmp_path) == ["n1"]


def test_the_supervisor_writes_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("interrupted", 100))
    write_job(replace(cluster.run.job, spares=0))
    assert cluster.supervise() == 0 and read_job(tmp_path) == cluster.run.job


def test_a_record_of_another_run_stops_it_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("interrupted", 100))
    write_job(replace(cluster.run.job, run_dir=str(tmp_path / "other")))
    (tmp_path / "other" / "job.json").rename(tmp_path / "job.json")
    with pytest.raises(FrontierError, match=r"run_dir is .*other, so this is the record of another run"):
        cluster.supervise()
    assert cluster.used == [] and cluster.requeued == 0


def test_a_budget_counts_all_nodes_of_the_allocation_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job has run for 50 minutes on three nodes before its first start: 2.5 of 2.5 node-hours."""
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("crash", 0))
    monkeypatch.setattr(slurm, "job_fields", lambda job: {"RunTime": "00:50:00"})
    cluster.run = replace(cluster.run, job=replace(cluster.run.job, max_node_hours=2.5))
    assert cluster.supervise() == 0 and cluster.used == []
    assert "2.5 of 2.5 node-hours are used" in capsys.readouterr().err
    (allocated,) = allocations.allocations(tmp_path)
    assert allocated.nodes == 3 and allocated.node_hours == pytest.approx(2.5, abs=0.1)


def test_the_last_answer_of_the_accounting_counts_when_there_is_no_time_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the run used its budget, but the next job was queued, because only the run's own record counted."""
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("interrupted", 1))
    run = replace(cluster.run, job=replace(cluster.run.job, max_node_hours=100.0))
    allocations.record(tmp_path, allocations.Allocated("7", 0, nodes=3, started_unix_s=0.0, seen_unix_s=3600.0))
    billed: dict[str, float] = {}
    monkeypatch.setattr(slurm, "billed_node_hours", lambda job_ids: {"7": 99.0})
    assert supervisor.read_history(run, 0, billed).node_hours == 99.0
    cluster._start_ranks(run, ("n0", "n1"), 0.0, 0.0)  # ends as interrupted
    monkeypatch.setattr(slurm, "billed_node_hours", lambda job_ids: pytest.fail("there is no time to ask"))
    assert supervisor.read_history(run, 0, billed).node_hours == 99.0


def test_the_operator_is_told_of_a_lost_node_and_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []
    monkeypatch.setattr(Notifier, "send", lambda self, event, text, step: sent.append((event, step)))
    ends = {1: ("node failure", 3), 2: ("interrupted", 97)}
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ends[number])
    assert cluster.supervise() == 0
    assert sent == [("node lost", 3), ("end", 100)]


def test_the_operator_is_told_that_the_run_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []
    monkeypatch.setattr(Notifier, "send", lambda self, event, text, step: sent.append((event, step)))
    cluster = Cluster(tmp_path, monkeypatch, lambda number: ("crash", 0))
    assert cluster.supervise() == 75  # 75 is the exit code of the ranks
    assert sent == [("given up", 0)]

    def admit(run: BatchRun) -> None:
        raise FrontierError("planted refusal")

    with pytest.raises(FrontierError, match="planted refusal"):
        supervise(cluster.run, admit)
    assert sent == [("given up", 0)] * 2


def test_each_change_of_plan_is_recorded_once(tmp_path: Path) -> None:
    """Regression: after a new submission on other nodes, the second change to the roomier plan, which needs less
    memory, was not recorded.
    """
    own = ("batch.micro_batch=8",)
    roomier = ("batch.micro_batch=4",)

    def start(nodes: tuple[str, ...], cause: str, plan: tuple[str, ...]) -> None:
        run_dir.record(tmp_path, run_dir.Attempt(1, "7", nodes, 0, 0, 1, cause, f"{cause} on {len(nodes)}", plan=plan))

    def reasons(nodes: int) -> list[str]:
        record_switch(SimpleNamespace(directory=tmp_path, plan=roomier, job=SimpleNamespace(nodes=nodes)))
        return [switch.reason for switch in run_dir.plan_switches(tmp_path)]

    start(("n0",), "out of memory", own)
    assert reasons(1) == ["out of memory on 1"]
    assert reasons(1) == ["out of memory on 1"]  # the supervisor ended before the start
    start(("n0",), "crash", roomier)
    assert reasons(1) == ["out of memory on 1"]
    start(("n0", "n1"), "out of memory", own)
    assert reasons(2) == ["out of memory on 1", "out of memory on 2"]
