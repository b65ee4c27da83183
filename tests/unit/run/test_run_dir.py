from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from frontier_llm.run import run_dir
from frontier_llm.run.holder import last_start, take
from frontier_llm.run.run_dir import Attempt
from tests.harness.checkpoints import save_only


def test_starts_are_numbered(tmp_path: Path) -> None:
    assert last_start(tmp_path) == {}
    assert take(tmp_path, "11", "n0") == 1
    assert take(tmp_path, "12", "n1") == 2
    assert (last_start(tmp_path)["job_id"], last_start(tmp_path)["host"]) == ("12", "n1")


def test_latest_step(tmp_path: Path) -> None:
    assert run_dir.latest_step(tmp_path) == 0
    save_only(tmp_path, 120)
    assert run_dir.latest_step(tmp_path) == 120


def test_redone_steps_replace_and_torn_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 2, "loss": 1}\n{"event": 1}\n{"step": 3, "lo'
    )
    assert [(row["step"], row["loss"]) for row in run_dir.steps(tmp_path)] == [(1, 3), (2, 1)]


def add(path: Path, start: int, end: int, cause: str = "crash", host: str = "") -> None:
    run_dir.record(path, Attempt(1, "1", ("n0", "n1"), start, end, 1, cause, failed_host=host))


def test_an_attempt_after_a_torn_line_is_not_lost(tmp_path: Path) -> None:
    add(tmp_path, 0, 5)
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"incarnation": 2, "job')  # the disk was full, or the machine crashed
    add(tmp_path, 5, 7)
    assert [attempt.end_step for attempt in run_dir.attempts(tmp_path)] == [5, 7]


def test_hosts_are_bad_when_down_or_first_to_fail_twice(tmp_path: Path) -> None:
    add(tmp_path, 0, 0, host="n1")
    assert run_dir.bad_hosts(tmp_path) == []
    add(tmp_path, 0, 0, host="n1")
    add(tmp_path, 0, 0, host="n2")
    run_dir.add_bad_hosts(tmp_path, ["n7"])
    assert run_dir.bad_hosts(tmp_path) == ["n1", "n7"]
    assert [attempt.failed_host for attempt in run_dir.attempts(tmp_path)] == ["n1", "n1", "n2"]


def test_hosts_are_slow_as_often_as_they_were_named(tmp_path: Path) -> None:
    def named(host: str, step: int, incarnation: int, slowdown: float = 1.5) -> dict[str, object]:
        return {"kind": "straggler", "host": host, "step": step, "incarnation": incarnation, "slowdown": slowdown}

    rows = [
        named("n1", 10, 1),
        named("n2", 30, 1),
        named("n2", 30, 1, 2.5),
        {"kind": "start", "step": 20},
        named("n1", 30, 2, 3.5),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # two ranks of n2 in the same step count once
    assert run_dir.slow_hosts(tmp_path) == [run_dir.Slow("n1", 2, 30, 3.5), run_dir.Slow("n2", 1, 30, 2.5)]


def test_a_start_counts_those_that_had_no_supervisor(tmp_path: Path) -> None:
    lock = tmp_path / "checkpoints" / "incarnations" / "00000007.json"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert take(tmp_path, "11", "n0") == 8


@pytest.mark.parametrize(("mode", "shared", "file_mode"), [(0o2770, True, 0o660), (0o2750, False, 0o600)])
def test_a_group_that_may_write_the_run_directory_may_write_its_files(
    tmp_path: Path, mode: int, shared: bool, file_mode: int
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(mode)
    before = os.umask(0o077)
    try:
        assert run_dir.share_with_group(run) is shared
        run_dir.append_line(run / "attempts.jsonl", {})
        (run / "checkpoints").mkdir()
    finally:
        os.umask(before)
    assert (run / "attempts.jsonl").stat().st_mode & 0o777 == file_mode
    assert bool((run / "checkpoints").stat().st_mode & 0o020) is shared
    assert not run_dir.share_with_group(tmp_path / "gone")
