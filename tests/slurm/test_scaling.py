"""Weak and strong series over 1, 2 and 4 nodes, from submission to the figure, and one point started by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster.sites import root_dir
from tests.harness.slurm import ROOT, LocalSlurm

TOY = [
    "model=gpt-tiny",
    "precision.dtype=fp32",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "batch.micro_batch=1",
    "train.steps=8",
]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return the local site with one rank per node. The complete series then has 12 ranks instead of 96."""
    text = (root_dir() / "slurm" / "sites" / "local.yaml").read_text()
    path = tmp_path / "one.yaml"
    path.write_text(text.replace("tasks_per_node: 8", "tasks_per_node: 1").replace("name: local", "name: one"))
    return path


@pytest.mark.timeout(900)
@pytest.mark.thorough
def test_series_run_end_to_end(
    cluster: LocalSlurm, tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "runs"
    job_ids = []
    for mode, batch in (("weak", ["--batch-per-replica", "2"]), ("strong", ["batch.global_batch=8"])):
        words = [
            "scaling",
            mode,
            "--run",
            "train_small",
            "--nodes",
            "1,2,4",
            "--site",
            str(site),
            "--output",
            str(out),
            "--json",
            *batch,
        ]
        assert main([*words, *TOY]) == 0
        job_ids += [point["job_id"] for point in json.loads(capsys.readouterr().out)]
    assert len(set(job_ids)) == 6
    for job_id in job_ids:
        assert cluster.wait_job(job_id, 400)["JobState"] == "COMPLETED"
    assert main(["scaling", "report", str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["mode"], row["nodes"], row["global_batch"], row["status"], row["kind"]) for row in rows] == [
        *(("strong", nodes, 8, "ok", "measured") for nodes in (1, 2, 4)),
        *(("weak", nodes, 2 * nodes, "ok", "measured") for nodes in (1, 2, 4)),
    ]
    assert all(row["steps"] == 5 and row["efficiency"] > 0 for row in rows)
    assert {path.suffix for path in out.glob("scaling.*")} == {".csv", ".json", ".html"}
    # Each point has run the copy of the code in its folder. Only this copy has a site called `one`.
    assert all(len(list(point.glob("code-*"))) == 1 for point in out.iterdir() if point.is_dir())


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_one_point_by_hand(cluster: LocalSlurm, tmp_path: Path) -> None:
    words = [*TOY, "batch.global_batch=2", f"train.run_dir={tmp_path}/runs"]
    options = ["-N2", "--ntasks-per-node=1", "--partition=local", f"--output={tmp_path}/job.out"]
    env = {"FRONTIER_LLM_PYTHON": sys.executable}
    job_id = cluster.submit(*options, str(ROOT / "slurm" / "weak_scaling.sbatch"), *words, cwd=ROOT, env=env)
    job = cluster.wait_job(job_id, 250)
    assert job["JobState"] == "COMPLETED", (tmp_path / "job.out").read_text()
    (point,) = (tmp_path / "runs").iterdir()
    assert point.name == f"weak_gpt-tiny_nodes00002_j{job_id}"
    assert json.loads((point / "point.json").read_text())["global_batch"] == 4
