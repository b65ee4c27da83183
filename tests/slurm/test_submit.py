"""`frontier-llm submit` on a real Slurm: the job that runs is the one that job.json records."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from frontier_llm.cluster.status import read_status
from frontier_llm.cluster.status_text import render
from frontier_llm.run import run_dir
from frontier_llm.run.job import read_job
from tests.harness.slurm import ROOT, LocalSlurm

NOTHING = {"tag": "estimated", "source": "a process on a CPU reserves no memory of a device"}
TINY = (
    "model=gpt-tiny",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "batch.micro_batch=1",
    "batch.global_batch=2",
    "optimizer.warmup_steps=1",
    "train.steps=2",
    "train.tensorboard=false",
)


@pytest.mark.thorough
def test_submitted_old_and_new_runs_go_on(cluster: LocalSlurm, tmp_path: Path) -> None:
    """A submitted job trains. Then its record is removed, as in a directory of an older version without job.json, and
    the run resumes.

    At the end, a damaged record ends the job before any rank starts.
    """
    directory = tmp_path / "run"
    site = yaml.safe_load((ROOT / "slurm" / "sites" / "local.yaml").read_text())
    site_file = tmp_path / "one_rank.yaml"
    site_file.write_text(yaml.safe_dump({**site, "name": "one_rank", "tasks_per_node": 1}))
    command = (sys.executable, "-P", "-m", "frontier_llm.cli.main", "submit", "train_small", *TINY)
    options = ("--site", str(site_file), "--nodes", "1", "--time", "0:30:00", f"train.run_dir={directory}")
    environment = {"PYTHONPATH": str(ROOT)}
    first = cluster.run(*command, *options, cwd=tmp_path, env=environment, timeout_s=300).split()[-1]
    text = directory / f"job-{first}.out"
    assert cluster.wait_job(first, 300)["JobState"] == "COMPLETED", text.read_text()
    job = read_job(directory)
    assert job is not None and (job.nodes, job.site, job.continuation) == (1, "one_rank", "requeue")
    assert run_dir.latest_step(directory) == 2

    (directory / "job.json").unlink()
    code = next(directory.glob("code-*"))
    again = {"FRONTIER_LLM_ROOT": str(code), "FRONTIER_LLM_SITE": "one_rank", "FRONTIER_LLM_PYTHON": sys.executable}
    again["FRONTIER_LLM_SIGNAL_LEAD_S"] = "130"
    words = (f"--output={text}", str(directory / "job.sbatch"), "train.steps=4", "--allow-change=train.steps")
    second = cluster.submit(*words, cwd=tmp_path, env=again)
    assert cluster.wait_job(second, 300)["JobState"] == "COMPLETED", text.read_text()
    made = run_dir.attempts(directory)
    assert [(attempt.start_step, attempt.end_step, attempt.cause) for attempt in made] == [
        (0, 2, "finished"),
        (2, 4, "finished"),
    ]
    job = read_job(directory)
    assert job is not None and job.warning_s == 130 and "FRONTIER_LLM_SIGNAL_LEAD_S is an old name" in text.read_text()

    (directory / "job.json").write_text('{"version": 1, "nodes": "one"}')
    third = cluster.submit(*words, cwd=tmp_path, env=again)
    job_fields = cluster.wait_job(third, 120)
    assert (job_fields["JobState"], job_fields["ExitCode"], job_fields["Restarts"]) == ("FAILED", "2:0", "0")
    assert "job.json: run_dir is missing, expected an absolute path" in text.read_text()
    assert len(run_dir.attempts(directory)) == 2


@pytest.mark.thorough
def test_a_run_out_of_memory_goes_on_with_the_roomier_plan(cluster: LocalSlurm, tmp_path: Path) -> None:
    """Rank 1 is out of memory in step 2 of the first start, before any checkpoint (planted).

    The second start uses the layout in job.json that needs less memory (the roomier plan). The second start reads the
    same samples from step 0 on.
    """
    directory = tmp_path / "run"
    machine = {"base": "local", "stacks": {"frontier-llm": {"reserve_gib": {**NOTHING, "value": 0.001}}}}
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(machine))
    shipped = yaml.safe_load((ROOT / "slurm" / "sites" / "local.yaml").read_text())
    own = {**shipped, "name": "two_ranks", "tasks_per_node": 2, "machine": str(tmp_path / "machine.yaml")}
    (tmp_path / "two_ranks.yaml").write_text(yaml.safe_dump(own))
    words = ("batch.micro_batch=16", "batch.global_batch=32", "train.steps=3", "train.log_interval=1")
    command = (sys.executable, "-P", "-m", "frontier_llm.cli.main", "submit", "train_small", *TINY, *words)
    site = ("--site", str(tmp_path / "two_ranks.yaml"), "--nodes", "1", "--time", "0:30:00")
    options = (*site, f"train.run_dir={directory}", "precision.dtype=fp32", "--fallback-plan")
    job_id = cluster.run(
        *command,
        *options,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "FRONTIER_LLM_FAILPOINTS": "train.step@1^1#2=error:HIP out of memory"},
        timeout_s=300,
    ).split()[-1]
    text = directory / f"job-{job_id}.out"
    assert cluster.wait_job(job_id, 300)["JobState"] == "COMPLETED", text.read_text()

    job = read_job(directory)
    assert job is not None and len(job.plans) == 2
    own_plan, roomier = job.plans
    assert "batch.micro_batch=16" in own_plan and "batch.micro_batch=16" not in roomier
    starts = run_dir.attempts(directory)
    assert [(start.cause, start.plan, start.end_step) for start in starts] == [
        ("out of memory", own_plan, 0),
        ("finished", roomier, 3),
    ]
    # the line that the supervisor wrote is still there after the ranks have resumed
    (switch,) = run_dir.plan_switches(directory)
    assert switch.plan == roomier and "HIP out of memory" in switch.reason and switch.step == 0
    assert "the roomier one since step 0" in render([read_status(directory)])
    rows = [row for row in run_dir.read_jsonl(directory / "metrics.jsonl") if row["kind"] == "step"]
    assert [(row["incarnation"], row["step"]) for row in rows] == [(1, 1), (2, 1), (2, 2), (2, 3)]
    assert [row["consumed_samples"] for row in rows] == [32, 32, 64, 96]
    assert abs(rows[0]["loss"] - rows[1]["loss"]) < 1e-5 * rows[0]["loss"]  # the same samples
