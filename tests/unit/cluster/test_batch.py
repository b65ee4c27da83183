"""Build the job that the supervisor runs, from the arguments of a batch script or from job.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.cluster.attempt import Outcome, start_ranks
from frontier_llm.cluster.batch import BatchRun, open_batch, split_flags, split_settings
from frontier_llm.cluster.sites import load_site
from frontier_llm.cluster.slurm import Allocation, NodeHealth
from frontier_llm.cluster.supervisor import main, too_slow
from frontier_llm.config import load_run
from frontier_llm.errors import FrontierError
from frontier_llm.run import run_dir
from frontier_llm.run.failure import Evidence, Failure
from frontier_llm.run.job import Job, read_job, write_job

SMALL = (
    "train_small",
    "model=gpt-tiny",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "batch.micro_batch=1",
    "batch.global_batch=64",
)
VARIABLES = {
    "FRONTIER_LLM_SPARE_NODES": "1",
    "FRONTIER_LLM_CONTINUE": "successor",
    "FRONTIER_LLM_MAX_NODE_HOURS": "12.5",
    "FRONTIER_LLM_SIGNAL_LEAD_S": "45",
    "FRONTIER_LLM_PREFLIGHT": "1",
}
WORDS = ("job.spares=1", "job.continuation=successor", "job.max_node_hours=12.5", "job.warning_s=45")
WANTED = {"nodes": 1, "spares": 1, "continuation": "successor", "max_node_hours": 12.5, "warning_s": 45.0}


@pytest.fixture(autouse=True)
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of the batch shell of a job on n0 and n1 of the site `local`."""
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURMD_NODENAME": "n0",
        "FRONTIER_LLM_SITE": "local",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def recorded(directory: Path, **fields: Any) -> Job:
    """Write and return the record of a run on one node in `directory`."""
    words = (*SMALL, f"train.run_dir={directory}")
    job = Job(**{"run_dir": str(directory), "words": words, "site": "local", "nodes": 2, "warning_s": 60.0, **fields})
    write_job(job)
    return job


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


@pytest.mark.parametrize(
    ("name", "variable", "text"),
    [
        ("spares", "FRONTIER_LLM_SPARE_NODES", "one"),
        ("spares", "FRONTIER_LLM_SPARE_NODES", "-1"),
        ("continuation", "FRONTIER_LLM_CONTINUE", "always"),
        *[("max_node_hours", "FRONTIER_LLM_MAX_NODE_HOURS", text) for text in ("many", "nan", "inf", "-1", "0")],
        ("warning_s", "FRONTIER_LLM_SIGNAL_LEAD_S", "soon"),
        ("preflight", "FRONTIER_LLM_PREFLIGHT", "perhaps"),
    ],
)
def test_a_setting_with_a_bad_value_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, variable: str, text: str
) -> None:
    words = (*SMALL, f"train.run_dir={tmp_path}")
    with pytest.raises(FrontierError, match=f"^job.{name}: '{text}' is "):
        open_batch((*words, f"job.{name}={text}"))
    monkeypatch.setenv(variable, text)
    with pytest.raises(FrontierError, match=f"^{variable}: '{text}' is "):
        open_batch(words)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(FrontierError, match=r"job.sparse=1 is not a setting of the job"):
        split_settings(["job.sparse=1"])


@pytest.mark.parametrize(("spares", "nodes"), [("0", 2), ("1", 1), ("2", None)])
def test_one_node_at_least_is_left_to_work(tmp_path: Path, spares: str, nodes: int | None) -> None:
    words = (*SMALL, f"train.run_dir={tmp_path}", f"job.spares={spares}")
    if nodes is None:
        with pytest.raises(FrontierError, match=r"job.spares: is 2, and the allocation has 2 nodes"):
            open_batch(words)
    else:
        assert open_batch(words).job.nodes == nodes


@pytest.mark.parametrize("by", ["words", "variables"])
def test_a_shipped_script_makes_the_record_of_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    words = (*SMALL, f"train.run_dir={tmp_path}", "--strict")
    if by == "variables":
        for name, value in VARIABLES.items():
            monkeypatch.setenv(name, value)
        run = open_batch(words)
        notices = capsys.readouterr().err
        assert all(f"{name} is an old name" in notices for name in VARIABLES)
    else:
        run = open_batch((*words[:3], *WORDS, "job.preflight=true", *words[3:]))
        assert "is an old name" not in capsys.readouterr().err
    expected = Job(
        run_dir=str(tmp_path),
        words=("train_small", "machine=local", *words[1:-1]),
        flags=("--strict",),
        site="local",
        preflight=True,
        **WANTED,
    )
    assert run.job == expected
    assert run.command[-2:] == (f"train.run_dir={tmp_path}", "--strict")


def test_a_word_counts_more_than_a_variable_and_the_last_word_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRONTIER_LLM_SIGNAL_LEAD_S", "45")
    run = open_batch((*SMALL, f"train.run_dir={tmp_path}", "job.warning_s=60", "job.warning_s=300"))
    assert run.job.warning_s == 300


def test_a_script_of_submit_receives_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = recorded(tmp_path, flags=("--strict",))
    monkeypatch.setenv("FRONTIER_LLM_CONTINUE", "never")
    run = open_batch((f"--run-dir={tmp_path}",))
    assert run.job == job and run.command[-1] == "--strict" and run.config.model.name == "gpt-tiny"
    assert "FRONTIER_LLM_CONTINUE=never is ignored" in capsys.readouterr().err
    run = open_batch((f"--run-dir={tmp_path}", "train.steps=7", "--allow-change=train.steps", "job.spares=0"))
    assert run.job == job  # arguments of one start are not recorded
    assert run.config.train.steps == 7 and run.command[-3:] == (
        "train.steps=7",
        "--strict",
        "--allow-change=train.steps",
    )


def test_a_directory_without_a_record_gets_it_from_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch script of an older version, without job.json, leaves such a directory."""
    (tmp_path / "run.yaml").write_text(f"base: train_small\ntrain: {{run_dir: {tmp_path}}}\n")
    words = [f"--run-dir={tmp_path}", *SMALL[1:]]
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    job = open_batch(words).job
    assert {name: getattr(job, name) for name in WANTED} == WANTED
    old = open_batch([str(tmp_path / "run.yaml"), "ops.no_jit=true", *SMALL[1:]]).job
    assert old == job


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"nodes": 3}, "nodes is 3, but this allocation has only 2"),
        ({"site": "lumi"}, "site is lumi, but this job runs on local"),
        ({"words": [*SMALL, "train.run_dir=/elsewhere"]}, "train.run_dir is /elsewhere, but this job trains in"),
        ({"nodes": 0}, "nodes is 0, expected a number of nodes, 1 or more"),
        ({"spares": "1"}, "spares is '1', expected a number of nodes, 0 or more"),
        ({"warning_s": None}, "warning_s is None, expected seconds"),
        ({"continuation": "always"}, "continuation is 'always', expected one of requeue, successor, never"),
        ({"max_node_hours": 0}, "max_node_hours is 0, expected node-hours above 0, or null"),
        ({"preflight": 1}, "preflight is 1, expected true or false"),
        ({"flags": "--strict"}, "flags is '--strict', expected a list of words"),
        ({"words": []}, "words is [], expected a list of words that begins with a run file"),
        ({"run_dir": "/elsewhere"}, "run_dir is /elsewhere, so this is the record of another run"),
        ({"version": 5}, "version is 5, but this program reads at most version 4"),
        ({"plans": [["parallel.tensor=2"]]}, "plans is [['parallel.tensor=2']], expected an empty list, or two lists"),
        ({"version": None}, "version is None, expected 4"),
        ({"failed_start_node_hours": 0}, "failed_start_node_hours is 0, expected node-hours above 0, or null"),
        ({"spears": 1}, "spears is not a field of a job; did you mean 'spares'?"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_record_that_does_not_fit_stops_the_job_before_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: dict, expected: str
) -> None:
    recorded(tmp_path)
    path = tmp_path / "job.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **change}))
    damaged = path.read_text()
    monkeypatch.setattr("frontier_llm.cluster.slurm.call", lambda *words, **named: pytest.fail("Slurm was asked"))
    assert main((f"--run-dir={tmp_path}",)) == 2  # exit code 2: Slurm does not requeue the job
    said = capsys.readouterr().err
    assert str(path) in said and expected in said and "fix: " in said
    assert path.read_text() == damaged


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", '{"version": 1}'])
def test_a_damaged_record_stops_a_shipped_script_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "job.json").write_text(content, encoding="latin-1")
    assert main((*SMALL, f"train.run_dir={tmp_path}")) == 2
    assert str(tmp_path / "job.json") in capsys.readouterr().err
    assert (tmp_path / "job.json").read_text(encoding="latin-1") == content


@pytest.mark.parametrize(("limit", "left_out"), [(None, ()), (2, ("n1",)), (1, ("n1", "n2"))])
def test_a_site_may_leave_out_hosts_that_were_named_slow(
    tmp_path: Path, limit: int | None, left_out: tuple[str, ...]
) -> None:
    rows = [
        {"kind": "straggler", "host": host, "step": step, "slowdown": 2.0}
        for host, step in (("n1", 3), ("n2", 5), ("n1", 9))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = on_two_nodes(tmp_path)
    site = run.site.model_copy(update={"exclude_slow_after": limit})
    assert too_slow(replace(run, site=site)) == left_out


def on_two_nodes(directory: Path) -> BatchRun:
    return BatchRun(
        job=Job(run_dir=str(directory), words=("train_small",), site="local", nodes=2, warning_s=60.0),
        config=load_run("train_small"),
        site=load_site("local"),
        allocation=Allocation("7", ("n0", "n1"), "n0", 1, 1),
    )


STUCK_ON_N1 = Failure("it gives no sign of life", Evidence.NOTICES, rank=1, host="n1", host_suspect=True)
UNKNOWN = Failure("lost a peer", Evidence.LOGS)


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (STUCK_ON_N1, ("crash", "n1")),
        (UNKNOWN, ("crash", "")),
        (replace(STUCK_ON_N1, host="another job's"), ("crash", "")),
        (replace(STUCK_ON_N1, evidence=Evidence.EXCEPTION, host_suspect=False), ("crash", "")),
        (replace(STUCK_ON_N1, evidence=Evidence.COMPARISON, cause="wrong results"), ("wrong results", "n1")),
    ],
)
def test_hosts_are_blamed_for_what_only_a_host_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Failure, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr("frontier_llm.cluster.attempt.run_step", lambda step: Outcome(1, ended))
    monkeypatch.setattr("frontier_llm.cluster.slurm.node_health", lambda nodes: NodeHealth())
    outcome, _ = start_ranks(on_two_nodes(tmp_path), ("n0", "n1"), None)
    (made,) = run_dir.attempts(tmp_path)
    assert (made.cause, made.failed_host) == expected and outcome.cause == made.cause
    assert outcome.failure == ended


@pytest.mark.parametrize(
    ("ended", "logged_step", "failed_start", "fault"),
    [
        (replace(STUCK_ON_N1, step=0), None, True, ""),
        (replace(STUCK_ON_N1, step=3), None, False, ""),
        (UNKNOWN, 2, False, ""),
        (Failure("KeyError: 'layer 17'", Evidence.EXCEPTION, step=0), None, True, "KeyError: 'layer #'"),
        (Failure("RuntimeError: NCCL error 3", Evidence.EXCEPTION), None, True, ""),
        (Failure("HIP error: invalid device", Evidence.LOGS), None, True, ""),
        (Failure("Killed", Evidence.ENDS), None, True, ""),
    ],
)
def test_a_start_without_a_step_is_recorded_with_the_error_of_the_program(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended: Failure,
    logged_step: int | None,
    failed_start: bool,
    fault: str,
) -> None:
    def run_step(step: object) -> Outcome:
        if logged_step is not None:
            row = {"kind": "step", "step": logged_step, "incarnation": 1, "loss": 1.0}
            run_dir.append_line(tmp_path / "metrics.jsonl", row)
        return Outcome(1, ended)

    monkeypatch.setattr("frontier_llm.cluster.attempt.run_step", run_step)
    monkeypatch.setattr("frontier_llm.cluster.slurm.node_health", lambda nodes: NodeHealth())
    monkeypatch.setattr("frontier_llm.cluster.attempt.dead_nodes", lambda run, nodes, outcome: [])
    start_ranks(on_two_nodes(tmp_path), ("n0", "n1"), None)
    (made,) = run_dir.attempts(tmp_path)
    assert (made.is_failed_start, made.fault) == (failed_start, fault)


def test_a_node_that_slurm_calls_down_is_the_cause_of_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draining nodes are not: before a maintenance all nodes drain."""
    monkeypatch.setattr("frontier_llm.cluster.attempt.run_step", lambda step: Outcome(1, STUCK_ON_N1))
    health = [NodeHealth(failed=("n0",), draining=("n1",)), NodeHealth(draining=("n0", "n1"))]
    monkeypatch.setattr("frontier_llm.cluster.slurm.node_health", lambda nodes: health.pop(0))
    for _ in range(2):
        start_ranks(on_two_nodes(tmp_path), ("n0", "n1"), None)
    failed, draining = run_dir.attempts(tmp_path)
    assert (failed.cause, failed.failed_host, failed.detail) == ("node failure", "n0", "n0 failed")
    assert (draining.cause, draining.failed_host) == ("crash", "n1")


def test_a_record_of_version_1_has_the_defaults_of_later_fields(tmp_path: Path) -> None:
    job = recorded(tmp_path)
    path = tmp_path / "job.json"
    content = {**json.loads(path.read_text()), "version": 1}
    del content["failed_start_node_hours"]
    path.write_text(json.dumps(content))
    assert read_job(tmp_path) == job and job.failed_start_limit == 3 * job.all_nodes


def test_the_record_holds_the_job_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRONTIER_LLM_JOB_SECRET", "s3cret")
    job = recorded(tmp_path)
    assert read_job(tmp_path) == job
    text = (tmp_path / "job.json").read_text()
    assert "s3cret" not in text
    fields = {"version", *(name for name in Job.__dataclass_fields__)}
    assert set(json.loads(text)) == fields
