from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.cluster.attempt import Outcome
from frontier_llm.cluster.job import attempt
from frontier_llm.cluster.job_spec import BatchJob, spare_nodes, split_flags
from frontier_llm.cluster.sites import Site, load_site
from frontier_llm.cluster.slurm import Allocation
from frontier_llm.config import load_run
from frontier_llm.errors import FrontierError
from frontier_llm.run import run_dir
from frontier_llm.run.failure import Evidence, Failure, read_failure


def test_flags_of_train_may_stand_anywhere_after_the_run_file() -> None:
    words = [
        "run.yaml",
        "train.steps=8",
        "--allow-change",
        "train.steps",
        "--strict",
        "batch.micro_batch=1",
        "--allow-change=model",
    ]
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


@pytest.mark.parametrize(("text", "spares"), [("", 0), ("1", 1), ("2", None), ("-1", None), ("one", None)])
def test_one_node_at_least_is_left_to_work(monkeypatch: pytest.MonkeyPatch, text: str, spares: int | None) -> None:
    monkeypatch.setenv("FRONTIER_LLM_SPARE_NODES", text)
    allocation = Allocation("7", ("n0", "n1"), "n0", 1, 1)
    if spares is not None:
        assert spare_nodes(allocation) == spares
    else:
        with pytest.raises(FrontierError, match=f"{text} of 2 nodes"):
            spare_nodes(allocation)


@pytest.mark.parametrize(("limit", "left_out"), [(None, []), (2, ["n1"]), (1, ["n1", "n2"])])
def test_a_site_may_leave_out_hosts_that_were_named_slow(
    tmp_path: Path, limit: int | None, left_out: list[str]
) -> None:
    rows = [
        {"kind": "straggler", "host": host, "step": step, "slowdown": 2.0}
        for host, step in (("n1", 3), ("n2", 5), ("n1", 9))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    site = load_site("local").model_copy(update={"exclude_slow_after": limit})
    assert job(tmp_path, site).too_slow == left_out


def job(directory: Path, site: Site) -> BatchJob:
    return BatchJob(
        load_run("train_small"), ("train_small",), directory, site, Allocation("7", ("n0", "n1"), "n0", 1, 1)
    )


STUCK_ON_N1 = Failure("it gives no sign of life", Evidence.NOTICES, rank=1, host="n1", host_suspect=True)
NOBODY_KNOWS = Failure("lost a peer", Evidence.LOGS)


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (STUCK_ON_N1, ("crash", "n1")),
        (NOBODY_KNOWS, ("crash", "")),
        (replace(STUCK_ON_N1, host="another job's"), ("crash", "")),
        (replace(STUCK_ON_N1, evidence=Evidence.EXCEPTION, host_suspect=False), ("crash", "")),
        (replace(STUCK_ON_N1, evidence=Evidence.COMPARISON, cause="wrong results"), ("wrong results", "n1")),
    ],
)
def test_hosts_are_blamed_for_what_only_a_host_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Failure, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr("frontier_llm.cluster.attempt.run_step", lambda step: Outcome(1, ended))
    monkeypatch.setattr("frontier_llm.cluster.slurm.time_left_s", lambda job_id: None)
    monkeypatch.setattr("frontier_llm.cluster.slurm.unhealthy", lambda nodes: [])
    outcome = attempt(job(tmp_path, load_site("local")), ("n0", "n1"))
    (recorded,) = run_dir.attempts(tmp_path)
    assert (recorded.cause, recorded.failed_host) == expected and outcome.cause == recorded.cause
    assert read_failure(tmp_path) == ended


def test_a_node_that_slurm_calls_down_is_the_cause_of_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontier_llm.cluster.attempt.run_step", lambda step: Outcome(1, STUCK_ON_N1))
    monkeypatch.setattr("frontier_llm.cluster.slurm.time_left_s", lambda job_id: None)
    monkeypatch.setattr("frontier_llm.cluster.slurm.unhealthy", lambda nodes: ["n0"])
    attempt(job(tmp_path, load_site("local")), ("n0", "n1"))
    (recorded,) = run_dir.attempts(tmp_path)
    assert (recorded.cause, recorded.failed_host, recorded.detail) == ("node failure", "n0", "n0 failed")
