"""Every committed script against the real sbatch."""

from __future__ import annotations

import pytest

from frontier_llm.cluster.sbatch import JOBS, render
from frontier_llm.cluster.sites import load_site
from tests.harness.slurm import ROOT, LocalSlurm


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_sbatch_accepts_every_option_on_a_machine_of_frontiers_size(cluster: LocalSlurm, job) -> None:
    said = cluster.run(
        "sbatch", "--test-only", "-A", "abc123", str(ROOT / "slurm" / f"{job.name}.sbatch"), "train.steps=1", cwd=ROOT, check=False
    )
    assert f"using {job.nodes * 64} processors" in said and "in partition batch" in said, said


def test_sbatch_refuses_an_option_that_does_not_exist(cluster: LocalSlurm, tmp_path) -> None:
    text = (ROOT / "slurm" / "train_1t.sbatch").read_text()
    (tmp_path / "x.sbatch").write_text(text.replace("--open-mode=append", "--opn-mode=append"))
    assert "unrecognized option" in cluster.run("sbatch", "--test-only", "-A", "abc123", str(tmp_path / "x.sbatch"), check=False)


def test_the_whole_machine_and_lumi(cluster: LocalSlurm, tmp_path) -> None:
    script = str(ROOT / "slurm" / "train_1t.sbatch")
    assert "frontier[00001-09408]" in cluster.run("sbatch", "--test-only", "-A", "a", "-N", "9408", script, check=False)
    (tmp_path / "lumi.sbatch").write_text(render(JOBS[1], load_site("lumi")))
    assert "in partition standard-g" in cluster.run("sbatch", "--test-only", "-A", "a", str(tmp_path / "lumi.sbatch"), check=False)


def test_wrong_directory_is_explained(cluster: LocalSlurm, tmp_path) -> None:
    script = str(ROOT / "slurm" / "train_small.sbatch")
    job_id = cluster.submit("-p", "local", "-C", "nvme", f"--output={tmp_path}/out", script, cwd=tmp_path, env={"FRONTIER_LLM_ROOT": ""})
    assert cluster.wait_job(job_id)["ExitCode"] == "2:0"
    assert "run sbatch from the checkout" in (tmp_path / "out").read_text()
