from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster import slurm
from frontier_llm.cluster import status as status_module
from frontier_llm.cluster.status import read_status
from frontier_llm.cluster.status_text import render
from frontier_llm.run import allocations, run_dir
from frontier_llm.run.allocations import Allocated
from frontier_llm.run.holder import take
from frontier_llm.run.job import Job, write_job
from tests.harness.checkpoints import save_only


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run at step 40 of 100 that crashed before, on a machine without Slurm."""
    monkeypatch.setenv("PATH", "/nonexistent")
    directory = tmp_path / "runs" / "a"
    directory.mkdir(parents=True)
    rows = [
        {"kind": "step", "step": step, "loss": 3 - step / 100, "tokens_per_s": 1000.0, "step_time_s": 2.0}
        for step in range(1, 41)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "config.yaml").write_text(
        "train: {steps: 100}\nbatch: {global_batch: 8}\nmodel: {sequence_length: 32}\n"
    )
    save_only(directory, 30)
    take(directory, "77", "n0")
    run_dir.record(directory, run_dir.Attempt(1, "77", ("n0",), 0, 30, 1, "crash", "rank 3 on n0 failed first", "n0"))
    run_dir.record(directory, run_dir.Attempt(2, "77", ("n0",), 30, 30, 75, "interrupted"))
    return directory


def test_status_of_a_directory(run_directory: Path) -> None:
    status = read_status(run_directory)
    assert (status.step, status.steps, status.checkpoint_step, status.state) == (40, 100, 30, "not queued")
    assert status.tokens == 40 * 8 * 32
    assert status.eta_s == 120.0 and status.loss == pytest.approx(2.6)
    assert status.restarts == 1 and status.causes == ("crash", "interrupted")
    assert status.last_failure == "rank 3 on n0 failed first"


def test_the_plan_in_use(run_directory: Path) -> None:
    """Regression: a run had changed to its roomier plan, which needs less memory. After a new submission with another
    plan, this change was still shown.
    """
    own = ("batch.micro_batch=8",)
    roomier = ("batch.micro_batch=4",)
    other = ("batch.micro_batch=2",)
    full = run_dir.Attempt(3, "78", ("n0",), 30, 30, 1, "out of memory", "out of memory", plan=own)
    run_dir.record(run_directory, full)
    run_dir.record_switch(run_directory, run_dir.PlanSwitch(30, roomier, "rank 0 is out of memory"))
    job = Job(str(run_directory), ("run.yaml",), "local", 1, 60.0, plans=(own, roomier))
    shown = "the roomier one since step 30 (batch.micro_batch=4), because rank 0 is out of memory"
    for submitted, is_shown in (
        (job, True),
        (replace(job, plans=(other, roomier)), False),
        (replace(job, plans=()), False),
        (replace(job, nodes=2), False),
    ):
        write_job(submitted)
        assert (shown in render([read_status(run_directory)])) is is_shown, submitted


def test_command_for_people_and_programs(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run_directory)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"step +40 of 100 +█{10}░{14} 40\.0%", text) and re.search(r"checkpoint +step 30, ", text)
    assert "1 (1 crash, 1 interrupted)" in text and "0:02:00 of training" in text
    assert all(re.match(r"  [a-z][a-z ]{10}\S", line) and len(line) <= 80 for line in text.splitlines()[1:]), text
    assert main(["status", "--json", str(run_directory)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["job_id"] == "77"


def test_several_runs_are_one_line_each(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = run_directory.parent
    copytree(run_directory, parent / "b")
    assert main(["status", str(parent)]) == 0
    told = capsys.readouterr()
    head, *rows = told.out.splitlines()
    assert head.split()[:3] == ["run", "state", "job"] and len(rows) == 2
    for row in rows:
        assert re.search(r"runs/[ab] +not queued +77 +40 +100 +40% +2\.6000 +1,000 +0:02:00 +1 +rank 3 on n0", row)
    assert "details of one run: frontier-llm status " in told.err
    assert main(["status", str(parent / "a"), str(parent / "b")]) == 0  # named runs are shown in detail
    assert capsys.readouterr().out.count("  checkpoint ") == 2


def test_what_the_job_asks_for(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(run_dir=str(run_directory), words=("run.yaml",), site="local", nodes=16, warning_s=60.0, spares=1)
    write_job(replace(job, max_node_hours=500.0))
    made = run_dir.Attempt(3, "77", ("n0", "n1"), 30, 40, 75, "interrupted", started_unix_s=0.0, ended_unix_s=5400.0)
    used = read_status(run_directory).node_hours
    run_dir.record(run_directory, made)
    status = read_status(run_directory)
    assert status.node_hours == pytest.approx(used + 3.0)
    assert main(["status", str(run_directory)]) == 0
    text = capsys.readouterr().out
    assert "  job        16 nodes + 1 spare of local, then requeue\n" in text
    left = 500.0 - status.node_hours
    assert status.node_hours_left == pytest.approx(left) and status.expected_end_unix_s is None
    # 60 steps of 2 s on 17 nodes
    expected = f"{status.node_hours:,.1f} of 500.0 used, {left:,.1f} left, about 0.6 more needed"
    assert f"  node-hours {expected}\n" in text
    assert main(["status", "--json", str(run_directory)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["job"]["spares"] == 1


def test_node_hours_are_what_slurm_charges(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has two starts of one requeued job, and a job that is running now. Spare nodes, gaps and the time before
    the first start count.
    """
    for restarts, start_h, end_h in ((0, 0, 1), (0, 0, 4), (1, 5, 6)):
        one = Allocated("77", restarts, nodes=17, started_unix_s=3600.0 * start_h, seen_unix_s=3600.0 * end_h)
        allocations.record(run_directory, one)
    assert read_status(run_directory).node_hours == pytest.approx(17 * 5)  # includes the starts of job 77
    now = time.time()
    allocations.record(run_directory, Allocated("78", 0, 17, started_unix_s=now - 7200, seen_unix_s=now - 3600))
    running = {"JobId": "78", "JobState": "RUNNING", "TimeLimit": "12:00:00", "RunTime": "02:00:00"}
    monkeypatch.setattr(status_module, "_job", lambda ids: ("78", running))
    status = read_status(run_directory)
    assert status.node_hours == pytest.approx(17 * 7, abs=0.1)  # the running job counts until now
    assert status.expected_end_unix_s == pytest.approx(now + 120.0, abs=60.0)
    assert ", until 20" in render([status])
    billed = {"77": 17 * 6.5, "78": 17 * 1.9}
    monkeypatch.setattr(slurm, "billed_node_hours", lambda ids, timeout_s: billed)
    assert read_status(run_directory).node_hours == pytest.approx(17 * (6.5 + 1.9), abs=0.1)


def test_a_batch_host_that_died_is_charged_until_the_last_line_of_its_ranks(run_directory: Path) -> None:
    allocations.extend_last(run_directory)
    assert allocations.allocations(run_directory) == []
    allocations.record(run_directory, Allocated("77", 0, 2, started_unix_s=0.0, seen_unix_s=60.0))
    run_dir.append_line(run_directory / "metrics.jsonl", {"kind": "save", "step": 40, "time": 7200.0})
    allocations.extend_last(run_directory)
    assert allocations.node_hours(run_directory, {}) == 4.0


def test_slow_hosts_and_waits(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = {"tp": {"calls": 9000, "p50_us": 128, "p99_us": 4096}}
    rows = [{"kind": "communication", "step": 20, "axes": {}}, {"kind": "communication", "step": 40, "axes": axes}]
    rows += [{"kind": "straggler", "step": step, "incarnation": 1, "host": "n7", "slowdown": 1.4} for step in (25, 38)]
    with (run_directory / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert main(["status", str(run_directory)]) == 0
    text = capsys.readouterr().out
    assert "  waits      tp median 128 us, 99th percentile 4.1 ms, 9,000 calls\n" in text
    assert "  slow       n7 2 times, last at step 38 by a factor of 1.4; exclude it with --exclude=n7" in text
    run_dir.add_bad_hosts(run_directory, ["n7"])
    assert main(["status", "--json", str(run_directory)]) == 0
    status = json.loads(capsys.readouterr().out)[0]
    assert (
        status["slow_hosts"] == [{"host": "n7", "times": 2, "last_step": 38, "slowdown": 1.4}]
        and status["blocked"] == axes
    )
    assert main(["status", str(run_directory)]) == 0
    assert "--exclude" not in (text := capsys.readouterr().out) and "  excluded   n7" in text


def test_runs_are_found_and_a_missing_one_is_an_error(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run_directory.parents[1])
    assert main(["status"]) == 0
    assert "runs/a" in capsys.readouterr().out
    (run_directory.parent / "table.csv").touch()
    (run_directory / "code-1" / "metrics.jsonl").mkdir(parents=True)  # runs are not searched inside a run
    assert main(["status", "runs", "--json"]) == 0
    assert [row["run_dir"] for row in json.loads(capsys.readouterr().out)] == ["runs/a"]
    assert main(["status", "runs/b"]) == 2
    assert "no such run directory" in capsys.readouterr().err


def test_a_run_without_a_final_checkpoint_is_finished_when_its_last_attempt_is(run_directory: Path) -> None:
    run_dir.record(run_directory, run_dir.Attempt(3, "77", ("n0",), 30, 100, 0, "finished"))
    assert read_status(run_directory).state == "not queued"  # the checkpoint of this run could not be written
    (run_directory / "config.yaml").write_text("train: {steps: 100, save_final: false}\n")
    assert read_status(run_directory).state == "finished"


@pytest.mark.parametrize(
    ("limit", "expected"), [("00:01:30", (60, 1)), ("2-00:00:00", (172770, 0)), ("UNLIMITED", (None, None))]
)
def test_a_running_job_says_what_is_left_of_it(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: tuple[int | None, int | None]
) -> None:
    monkeypatch.setattr(
        slurm, "job_fields", lambda job_id: {"JobState": "RUNNING", "TimeLimit": limit, "RunTime": "00:00:30"}
    )
    status = read_status(run_directory)
    assert status.state == "running" and (status.walltime_left_s, status.slices_left) == expected


def test_finished_and_stopped(run_directory: Path) -> None:
    (run_directory / run_dir.STOP_FILE).touch()
    assert read_status(run_directory).state == "stopped"
    save_only(run_directory, 100)
    assert read_status(run_directory).state == "finished"
