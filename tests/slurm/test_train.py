"""The committed job scripts train for real, on four nodes that this machine pretends to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frontier_llm.cluster import run_dir
from tests.harness.slurm import ROOT, LocalSlurm

# widths and depth of a toy; the degrees and the node count are what the test is about
TOY = (
    "model.layers=4",
    "model.hidden=64",
    "model.heads=8",
    "model.ffn_hidden=128",
    "model.vocab_size=250",
    "model.vocab_multiple=64",
    "model.sequence_length=16",
    "precision.dtype=fp32",
    "train.tensorboard=false",
    "train.recompute=none",
    "optimizer.warmup_steps=2",
)


def sbatch(
    cluster: LocalSlurm, script: str, directory: Path, *options: str, words: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> str:
    """Submit a committed script; what differs from Frontier is the partition, not the script."""
    local = ("--partition=local", f"--output={directory}/job.out", *options)
    directory.mkdir(parents=True, exist_ok=True)
    return cluster.submit(*local, str(ROOT / "slurm" / script), *TOY, f"train.run_dir={directory}/run", *words, cwd=ROOT, env=env)


def losses(directory: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in run_dir.steps(directory / "run")]


@pytest.mark.timeout(700)
def test_train_1t_runs_on_four_nodes_with_tp8_and_pp4(cluster: LocalSlurm, tmp_path: Path) -> None:
    words = ("parallel.pipeline=4", "batch.global_batch=4", "train.steps=3")
    job_id = sbatch(cluster, "train_1t.sbatch", tmp_path, "--nodes=4", "--time=20", words=words, env={"FRONTIER_LLM_SIGNAL_LEAD_S": "10"})
    job = cluster.wait_job(job_id, 540)
    text = (tmp_path / "job.out").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3]
    assert run_dir.latest_step(tmp_path / "run") == 3
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["grid"]["tp"], plan["grid"]["pp"], plan["grid"]["dp"]) == (8, 4, 1)
    assert len(list((tmp_path / "run" / "logs" / "attempt_0001").glob("rank_*.log"))) == 32
    assert cluster.queued() == []
