"""A live search on the local Slurm. srun runs the trials, the walltime ends the search, and the next job continues it.
The result is a run file of the fastest layout.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path

import pytest

from frontier_llm.config import load_run
from frontier_llm.run.run_dir import attempts
from tests.harness.slurm import ROOT, LocalSlurm

WORDS = ["model=gpt-tiny", "precision.dtype=fp32", "batch.global_batch=8"]
NODES = 2


def rows(output: Path) -> list[dict[str, str]]:
    path = output / "trials.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []


@pytest.mark.thorough
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_search_goes_on_after_its_walltime(cluster: LocalSlurm, tmp_path: Path) -> None:
    output = tmp_path / "tune"

    def submit(name: str, trials: int) -> str:
        options = [
            f"-N{NODES}",
            "--ntasks-per-node=1",
            "--partition=local",
            "--time=20",
            f"--output={tmp_path}/{name}.out",
        ]
        search = ["--max-node-hours", "1", "--steps", "6", "--trials", str(trials), "--output", str(output)]
        return cluster.submit(*options, str(ROOT / "slurm" / "tune.sbatch"), *WORDS, *search, cwd=ROOT)

    first = submit("first", 50)
    began_s = time.monotonic()
    cluster.wait_for(
        lambda: (
            len(rows(output)) >= 1 or (cluster.job(first)["JobState"] != "RUNNING" and time.monotonic() - began_s > 60)
        ),
        300,
        "a trial",
    )
    # Set the time limit so that the job ends in about two minutes. Slurm's warning time and the end of the job take a
    # part of this time, so that only a few more trials fit.
    cluster.run("scontrol", "update", f"JobId={first}", f"TimeLimit={int(time.monotonic() - began_s) // 60 + 2}")
    assert cluster.wait_job(first, 300)["JobState"] == "COMPLETED", (tmp_path / "first.out").read_text()[-3000:]
    assert "run the same command again to continue" in (tmp_path / "first.out").read_text()
    before = rows(output)
    assert before[0]["why"] == "planner" and before[0]["status"] == "ok"

    second = submit("second", sum(row["status"] != "interrupted" for row in before) + 1)
    assert cluster.wait_job(second, 300)["JobState"] == "COMPLETED", (tmp_path / "second.out").read_text()[-3000:]
    after = rows(output)
    assert after[: len(before)] == before and [int(row["number"]) for row in after] == list(range(1, len(before) + 2))
    starts = [attempts(output / f"trial_{number:04}")[0] for number in range(1, len(after) + 1)]
    assert [start.job_id for start in starts] == [first] * len(before) + [second], (
        "each by srun inside the job of its time"
    )
    assert all(len(start.nodes) == NODES for start in starts)
    fastest = min((row for row in after if row["step_s"]), key=lambda row: float(row["step_s"]))
    best = load_run(str(output / "best.yaml"))
    assert (best.parallel.tensor, best.parallel.pipeline) == (int(fastest["tp"]), int(fastest["pp"]))
    assert (output / "tune.html").exists()
