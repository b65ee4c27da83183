"""A successor job differs from the one before it in what it has learnt, not in where it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from frontier_llm.cluster import slurm
from frontier_llm.cluster.hand_on import hand_on
from frontier_llm.cluster.job_spec import BatchJob
from frontier_llm.cluster.sites import load_site
from frontier_llm.config import load_run
from frontier_llm.run import run_dir


def test_a_successor_runs_where_its_predecessor_did_on_none_of_the_bad_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def call(command: Sequence[str], env: Mapping[str, str]) -> str:
        calls.append((command, env))
        return "8;cluster\n"

    monkeypatch.setattr(slurm, "call", call)
    for name, value in {"ACCOUNT": "abc1", "PARTITION": "extended", "QOS": "normal"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    (tmp_path / "job.sbatch").touch()
    run_dir.add_bad_hosts(tmp_path, ["n1"])
    allocation = slurm.Allocation("7", ("n0", "n1"), "n0", 1, 1)
    job = BatchJob(
        load_run("train_small"), ("train_small",), tmp_path, load_site("local"), allocation, continue_with="successor"
    )
    assert hand_on(job) == 0 and run_dir.queued_job(tmp_path) == "8"
    ((command, env),) = calls
    assert {"--account=abc1", "--partition=extended", "--qos=normal", "--exclude=n1", "--dependency=afterany:7"} <= set(
        command
    )
    assert f"--output={tmp_path}/job-%j.out" in command and command[-1] == f"{tmp_path}/job.sbatch"
    assert f"--signal=USR1@{env['FRONTIER_LLM_SIGNAL_LEAD_S']}" in command
