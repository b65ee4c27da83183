from __future__ import annotations

import json
from pathlib import Path

import pytest

from frontier_llm.cluster import run_dir
from frontier_llm.cluster.attempt import Outcome, Step
from frontier_llm.cluster.job import attempt
from frontier_llm.cluster.job_spec import Job, split_flags
from frontier_llm.cluster.sites import Site, load_site
from frontier_llm.cluster.slurm import Allocation
from frontier_llm.config import load_run
from frontier_llm.errors import FrontierError


def test_flags_of_train_may_stand_anywhere_after_the_run_file() -> None:
    words = ["run.yaml", "train.steps=8", "--allow-change", "train.steps", "--strict", "batch.micro_batch=1", "--allow-change=model"]
    assert split_flags(words) == (
        ("run.yaml", "train.steps=8", "batch.micro_batch=1"),
        ("--allow-change", "train.steps", "--strict", "--allow-change=model"),
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run.yaml", "--alow-change", "x"], "--allow-change"),
        (["run.yaml", "--allow-change"], "needs the name"),
        (["--strict"], "no run file"),
    ],
)
def test_other_flags_are_refused_before_any_rank_starts(words: list[str], expected: str) -> None:
    with pytest.raises(FrontierError, match=expected):
        split_flags(words)


@pytest.mark.parametrize(("limit", "left_out"), [(None, []), (2, ["n1"]), (1, ["n1", "n2"])])
def test_a_site_may_leave_out_hosts_that_were_named_slow(tmp_path: Path, limit: int | None, left_out: list[str]) -> None:
    rows = [{"kind": "straggler", "host": host, "step": step, "slowdown": 2.0} for host, step in (("n1", 3), ("n2", 5), ("n1", 9))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    site = load_site("local").model_copy(update={"exclude_slow_after": limit})
    assert job(tmp_path, site).too_slow == left_out


def job(directory: Path, site: Site) -> Job:
    return Job(load_run("train_small"), ("train_small",), directory, site, Allocation("7", ("n0", "n1"), "n0", 1, 1, 0))


STUCK_ON_N1 = {"rank": 1, "host": "n1", "what": "it gives no sign of life", "written_by_rank": 0}


@pytest.mark.parametrize(
    ("ended", "told", "expected"),
    [
        (Outcome("crash", 1, "lost a peer"), STUCK_ON_N1, ("crash", "n1")),
        (Outcome("crash", 1, "lost a peer"), {**STUCK_ON_N1, "written_by_rank": 1}, ("crash", "")),  # could not ask the others
        (Outcome("crash", 1, "lost a peer"), {**STUCK_ON_N1, "host": "an unknown host"}, ("crash", "")),
        (Outcome("crash", 1, "killed", "n0", 0, host_suspect=True), STUCK_ON_N1, ("crash", "n0")),  # srun has seen it itself
        (Outcome("crash", 1, "boom", "n0", 0), {}, ("crash", "")),
        (Outcome("crash", 1, "boom", "n0", 0), {**STUCK_ON_N1, "suspects": []}, ("wrong results", "n1")),
    ],
)
def test_hosts_are_blamed_for_what_only_a_host_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Outcome, told: dict[str, object], expected: tuple[str, str]
) -> None:
    def run_step(step: Step) -> Outcome:
        (tmp_path / "failure.json").write_text(json.dumps(told))
        return ended

    monkeypatch.setattr("frontier_llm.cluster.job.run_step", run_step)
    monkeypatch.setattr("frontier_llm.cluster.slurm.time_left_s", lambda job_id: None)
    monkeypatch.setattr("frontier_llm.cluster.slurm.unhealthy", lambda nodes: [])
    outcome = attempt(job(tmp_path, load_site("local")), ("n0", "n1"))
    (recorded,) = run_dir.attempts(tmp_path)
    assert (recorded.cause, recorded.failed_host) == expected and outcome.cause == recorded.cause
