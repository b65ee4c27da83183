"""A successor job keeps the queue and account of the previous job, but uses the newly measured warning time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from frontier_llm.cluster import slurm
from frontier_llm.cluster.batch import BatchRun
from frontier_llm.cluster.sites import load_site
from frontier_llm.cluster.supervisor import queue_successor
from frontier_llm.config import load_run
from frontier_llm.run import run_dir
from frontier_llm.run.job import Job, read_job


def test_a_successor_runs_where_its_predecessor_did_on_none_of_the_bad_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def call(command: Sequence[str], env: Mapping[str, str]) -> str:
        calls.append((command, env))
        return "8;cluster\n"

    monkeypatch.setattr(slurm, "call", call)
    for name in [name for name in os.environ if name.startswith(("SLURM", "FRONTIER_LLM_"))]:
        monkeypatch.delenv(name)
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": "1",  # Slurm sets it only in a job that was requeued
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURMD_NODENAME": "n0",
        "FRONTIER_LLM_RANK_PYTHON": "/code/launch/container_python.sh",
        "FRONTIER_LLM_BROKEN_NODES": "n1",
        "FRONTIER_LLM_CONTAINER": "/tmp/frontier_llm_env_7/image.sif",  # a copy of this job's nodes
        "FRONTIER_LLM_SHARED_CONTAINER": "/lustre/image.sif",
        "FRONTIER_LLM_PYTHON": "/env/bin/python",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name, value in {"ACCOUNT": "abc1", "PARTITION": "extended", "QOS": "normal"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    (tmp_path / "job.sbatch").touch()
    run_dir.add_bad_hosts(tmp_path, ["n1"])
    allocation = slurm.Allocation("7", ("n0", "n1"), "n0", 1, 1)
    rows = [
        {"kind": "step", "step": 1, "loss": 1.0, "time": 100.0, "step_time_s": 30.0},
        {"kind": "save", "step": 1, "time": 190.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = Job(
        run_dir=str(tmp_path),
        words=("train_small",),
        site="local",
        nodes=2,
        warning_s=600,
        continuation="successor",
        sbatch=("mail-type=END", "comment=my run"),
    )
    queue_successor(BatchRun(job=job, config=load_run("train_small"), site=load_site("local"), allocation=allocation))
    assert run_dir.queued_job(tmp_path) == "8"
    ((command, env),) = calls
    assert {"--account=abc1", "--partition=extended", "--qos=normal", "--exclude=n1", "--dependency=afterany:7"} <= set(
        command
    )
    assert f"--output={tmp_path}/job-%j.out" in command and command[-1] == f"{tmp_path}/job.sbatch"
    assert {"--mail-type=END", "--comment=my run"} <= set(command)
    of_job = {name: value for name, value in env.items() if name.startswith(("SLURM", "FRONTIER_LLM_"))}
    assert of_job == {
        "SLURM_CONF": "/etc/slurm.conf",
        "FRONTIER_LLM_CONTAINER": "/lustre/image.sif",
        "FRONTIER_LLM_PYTHON": "/env/bin/python",
    }
    assert "--export=ALL" in command  # also if the user's shell has SBATCH_EXPORT=NONE
    recorded = read_job(tmp_path)
    assert recorded is not None and recorded.warning_s == 300  # measured: 2 x (30 + 90) + 60
    assert "--signal=USR1@300" in command and env.get("FRONTIER_LLM_SIGNAL_LEAD_S") is None
    # a script of an older version, without job.json, reads the variable
    monkeypatch.setenv("FRONTIER_LLM_SIGNAL_LEAD_S", "25")
    monkeypatch.setattr(slurm, "is_active", lambda job_id, patience_s: False)
    queue_successor(BatchRun(job=job, config=load_run("train_small"), site=load_site("local"), allocation=allocation))
    assert calls[-1][1]["FRONTIER_LLM_SIGNAL_LEAD_S"] == "300"
