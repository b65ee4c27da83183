"""The command `evaluate --follow`: which checkpoints it evaluates, when it ends, and how it handles failures."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from frontier_llm.cluster import follow, slurm
from frontier_llm.cluster.attempt import ENDING_S
from frontier_llm.cluster.decide import SLURM_EARLY_S
from frontier_llm.cluster.follow import Follower, SlurmEvaluator, WalltimeReached
from frontier_llm.cluster.sbatch import JOBS
from frontier_llm.cluster.sites import load_site
from frontier_llm.errors import ConfigError, FrontierError
from frontier_llm.run import allocations
from frontier_llm.run.allocations import Allocated
from frontier_llm.run.complete import MANIFEST, MANIFEST_DIGEST, digest_line, step_name
from frontier_llm.run.evaluations import Evaluated, newest_result
from frontier_llm.run.records import DamagedRecord
from frontier_llm.units import strict_json


def save(directory: Path, step: int) -> Path:
    """Write an empty checkpoint that counts as complete."""
    path = directory / "checkpoints" / step_name(step)
    path.mkdir(parents=True)
    content = strict_json({"progress": {"step": step}, "shards": []}).encode()
    (path / MANIFEST).write_bytes(content)
    (path / MANIFEST_DIGEST).write_bytes(digest_line(content))
    return path


def delete(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


class Stub:
    """Evaluator that writes an empty result, unless `before` raises an error code."""

    def __init__(self, before: Callable[[Path], int] = lambda checkpoint: 0) -> None:
        self.before = before
        self.steps: list[str] = []
        self.left_s = math.inf

    def evaluate(self, checkpoint: Path, output: Path) -> int:
        self.steps.append(checkpoint.name)
        code = self.before(checkpoint)
        if code == 0:
            output.write_text("{}")
        return code

    def time_left_s(self) -> float:
        return self.left_s


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that trains until the test calls the end."""
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr(follow, "is_running", lambda directory: not (directory / "ended").exists())
    return tmp_path


def end(run: Path) -> None:
    (run / "ended").touch()


def test_each_checkpoint_is_evaluated_once_until_the_run_ends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = 0

    def wait(seconds: float) -> None:
        nonlocal waits
        waits += 1
        save(run, 20 + 10 * waits)
        if waits == 2:
            end(run)

    monkeypatch.setattr(follow.time, "sleep", wait)
    stub = Stub()
    Follower(run, run / "results", stub).run()
    assert stub.steps == [step_name(step) for step in (20, 10, 30, 40)]
    Follower(run, run / "results", again := Stub()).run()
    assert again.steps == []


def test_the_start_of_the_run_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run appears, joins its ranks, loads, saves and ends, one of these at each wait."""
    run = tmp_path / "run"
    events: list[Callable[[], object]] = [
        run.mkdir,
        (run / "checkpoints").mkdir,
        (run / "config.yaml").touch,
        lambda: save(run, 10),
        lambda: end(run),
    ]
    monkeypatch.setattr(follow.time, "sleep", lambda seconds: events.pop(0)())
    monkeypatch.setattr(follow, "is_running", lambda directory: run.exists() and not (run / "ended").exists())
    monkeypatch.setattr(follow.time, "monotonic", lambda: -100.0 * len(events))
    stub = Stub()
    Follower(run, run / "results", stub).run()
    assert stub.steps == [step_name(10)] and events == []


def test_a_run_that_does_not_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(follow.time, "sleep", waits.append)
    monkeypatch.setattr(follow.time, "monotonic", lambda: 60.0 * len(waits))
    stub = Stub()
    with pytest.raises(ConfigError, match="is not the directory of a run that starts"):
        Follower(tmp_path / "run", tmp_path / "run" / "results", stub).run(poll_s=60.0)
    assert len(waits) == 5 and not (tmp_path / "run").exists()
    checkpoint = save(tmp_path, 10)
    with pytest.raises(ConfigError, match="is not the directory of a run that starts"):
        Follower(checkpoint, checkpoint / "results", stub).run()
    assert len(waits) == 5, "a checkpoint is refused at once"
    stub.left_s = 30.0
    with pytest.raises(WalltimeReached):
        Follower(tmp_path / "later", tmp_path / "later" / "results", stub).run(poll_s=60.0)


def test_a_mistyped_directory_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(follow.time, "sleep", waits.append)
    monkeypatch.setattr(follow.time, "monotonic", lambda: 60.0 * len(waits))
    save(tmp_path / "quickstart", 10)
    mistyped = tmp_path / "quikstart"
    with pytest.raises(ConfigError, match=r"did you mean .*/quickstart"):
        Follower(mistyped, mistyped / "results", Stub()).run(poll_s=60.0)
    assert waits == []


def test_no_evaluation_runs_when_slurm_may_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = [job for job in JOBS if job.name == "evaluate"]
    site = load_site("frontier")
    allocation = slurm.Allocation("7", ("n0",), "n0", 8, 7)
    evaluator = SlurmEvaluator(words=(), directory=Path("run"), site=site, allocation=allocation)
    monkeypatch.setattr(slurm, "time_left_s", lambda job_id: job.signal_s(site) + SLURM_EARLY_S + ENDING_S)
    assert evaluator.time_left_s() <= 0


def test_a_checkpoint_that_the_run_deletes_is_left_out(run: Path) -> None:
    end(run)

    def vanish(checkpoint: Path) -> int:
        if checkpoint.name == step_name(10):
            delete(checkpoint)
            return 1
        return 0

    stub = Stub(vanish)
    Follower(run, run / "results", stub).run()
    assert stub.steps == [step_name(20), step_name(10)]


def test_failures_are_named_and_do_not_repeat(run: Path) -> None:
    end(run)
    save(run, 30)
    stub = Stub(lambda checkpoint: int(checkpoint.name == step_name(20)))
    with pytest.raises(FrontierError, match="not evaluated: steps 20"):
        Follower(run, run / "results", stub).run()
    assert stub.steps == [step_name(step) for step in (30, 20, 10)]
    (run / "ended").unlink()  # the run goes on, and three failures end the command
    with pytest.raises(FrontierError, match="not evaluated: steps 30, 20, 10"):
        Follower(run, run / "others", Stub(lambda checkpoint: 1)).run()


def test_the_walltime_ends_the_job_and_not_the_evaluations(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    stub.left_s = 30.0
    with pytest.raises(WalltimeReached):
        Follower(run, run / "results", stub).run(poll_s=60.0)
    assert stub.steps == [step_name(20), step_name(10)]

    def out_of_time(checkpoint: Path) -> int:
        late.left_s = 0.0
        return 1

    late = Stub(out_of_time)
    with pytest.raises(FrontierError, match="within the walltime of one job"):
        Follower(run, run / "other", late).run()
    late = Stub(lambda checkpoint: 0 if checkpoint.name == step_name(20) else out_of_time(checkpoint))
    with pytest.raises(WalltimeReached):
        Follower(run, run / "third", late).run()


def test_a_run_ends_with_its_process_and_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not follow.is_running(tmp_path)
    prepares = Allocated("18", restarts=0, nodes=1, started_unix_s=0.0, seen_unix_s=0.0)
    allocations.record(tmp_path, prepares)  # before its first start, for example while it examines its nodes
    monkeypatch.setattr(slurm, "is_active", lambda job_id: job_id == "18")
    assert follow.is_running(tmp_path)
    (tmp_path / "successor").write_text("17\n")
    monkeypatch.setattr(slurm, "is_active", lambda job_id: job_id == "17")
    assert follow.is_running(tmp_path)
    monkeypatch.setattr(slurm, "is_active", lambda job_id: False)
    assert not follow.is_running(tmp_path)

    def away(job_id: str) -> bool:
        raise slurm.ControllerAway("does not respond")

    monkeypatch.setattr(slurm, "is_active", away)
    assert follow.is_running(tmp_path)


def test_the_newest_result_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations"
    folder.mkdir()
    assert newest_result(tmp_path) is None
    rows = {
        "held_out": [{"dataset": "data/val", "loss": 2.5}],
        "tasks": [{"task": "piqa", "acc": 0.75}, {"task": "essay", "acc": None}],
    }
    (folder / "step_00000010.json").write_text("{}")
    (folder / "step_00000020.json").write_text(strict_json(rows))
    assert newest_result(tmp_path) == Evaluated(20, {"data/val": 2.5}, {"piqa": 0.75})
    (folder / "step_00000030.json").write_text('{"held_out": ["x"]}')
    with pytest.raises(DamagedRecord, match="is not the result of an evaluation"):
        newest_result(tmp_path)
