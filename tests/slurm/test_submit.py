"""`frontier-llm submit` on a real Slurm: the job that runs is the one that job.json records."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from frontier_llm.run import run_dir
from frontier_llm.run.job import read_job
from tests.harness.slurm import ROOT, LocalSlurm

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


def test_submitted_old_and_new_runs_go_on(cluster: LocalSlurm, tmp_path: Path) -> None:
    """A submitted job trains. Then the record is removed, as in a directory from before job.json, and the run resumes.

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
