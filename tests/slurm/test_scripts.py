"""Submits every committed script with the real sbatch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.cluster.sbatch import JOBS, render
from frontier_llm.cluster.sites import load_site
from frontier_llm.machine.affinity import NODE
from tests.harness.slurm import (
    FRONTIER_NODE,
    LUMI_NODE,
    ROOT,
    TESTED_VERSION,
    LocalSlurm,
    NodeShape,
    local_slurm,
    why_unavailable,
)
from tests.harness.system import missing


@pytest.mark.thorough
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_sbatch_accepts_every_option_on_a_machine_of_frontiers_size(cluster: LocalSlurm, job) -> None:
    said = cluster.run(
        "sbatch",
        "--test-only",
        "-A",
        "abc123",
        str(ROOT / "slurm" / f"{job.name}.sbatch"),
        "train.steps=1",
        cwd=ROOT,
        check=False,
    )
    assert f"using {job.nodes * FRONTIER_NODE.job_cpus} processors" in said and "in partition batch" in said, said


def test_the_tested_version_is_the_one_that_the_pages_state(cluster: LocalSlurm) -> None:
    version = cluster.run("sinfo", "--version").split()[-1]
    assert version.rpartition(".")[0] == TESTED_VERSION
    assert f"Tested with Slurm {TESTED_VERSION}" in (ROOT / "docs" / "frontier.md").read_text(encoding="utf-8")


def test_sbatch_refuses_an_option_that_does_not_exist(cluster: LocalSlurm, tmp_path) -> None:
    text = (ROOT / "slurm" / "train_1t.sbatch").read_text()
    (tmp_path / "x.sbatch").write_text(text.replace("--open-mode=append", "--opn-mode=append"))
    assert "unrecognized option" in cluster.run(
        "sbatch", "--test-only", "-A", "abc123", str(tmp_path / "x.sbatch"), check=False
    )


def test_the_whole_machine_and_lumi(cluster: LocalSlurm, tmp_path) -> None:
    script = str(ROOT / "slurm" / "train_1t.sbatch")
    assert "frontier[00001-09408]" in cluster.run("sbatch", "--test-only", "-A", "a", "-N", "9408", script, check=False)
    (tmp_path / "lumi.sbatch").write_text(render(JOBS[1], load_site("lumi")))
    assert "in partition standard-g" in cluster.run(
        "sbatch", "--test-only", "-A", "a", str(tmp_path / "lumi.sbatch"), check=False
    )


# Replaces launch/job.sh. It starts the supervisor's job step with a command that prints the step's share of the node.
SHOW_STEP = """
import subprocess
from frontier_llm.cluster.attempt import job_step
from frontier_llm.cluster.batch import open_batch
from pathlib import Path
run = open_batch(("train_small", "data.train=synthetic"))
srun = job_step(run, run.allocation.nodes, Path("."), {}, None).srun()
options = srun[: next(at for at, word in enumerate(srun) if word.endswith("rank.sh"))]
show = "echo task of $SLURM_CPUS_PER_TASK; sleep 2; if [ $SLURM_PROCID = 0 ]; then scontrol show step $SLURM_JOB_ID.0; fi"
subprocess.run([*options, "bash", "-c", show], check=True)
subprocess.run(["scontrol", "show", "job", "--details", run.allocation.job_id], check=True)
"""  # noqa: E501


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "shape"), [("frontier", FRONTIER_NODE), ("lumi", LUMI_NODE)], ids=["frontier", "lumi"]
)
@pytest.mark.parametrize("hint", ["", "nomultithread"])  # LUMI's login environment may set it
def test_a_step_has_every_core_that_ranks_are_bound_to(tmp_path: Path, name: str, shape: NodeShape, hint: str) -> None:
    """With two threads per core, seven CPUs for each of eight tasks are only 28 cores, unless the job requests one
    thread per core.
    """
    if reason := why_unavailable():
        missing(reason)
    site = load_site(name)
    (tmp_path / "launch").mkdir()
    (tmp_path / "show.py").write_text(SHOW_STEP)
    (tmp_path / "launch" / "job.sh").write_text(f"#!/bin/bash\nexec {sys.executable} {tmp_path}/show.py\n")
    (tmp_path / "launch" / "job.sh").chmod(0o755)
    (small,) = [job for job in JOBS if job.name == "train_small"]
    (tmp_path / "x.sbatch").write_text(render(replace(small, site=name), site))
    if name == "frontier":
        assert (tmp_path / "x.sbatch").read_text() == (ROOT / "slurm" / "train_small.sbatch").read_text()
    env = {"FRONTIER_LLM_ROOT": str(tmp_path), "FRONTIER_LLM_SITE": name, "PYTHONPATH": str(ROOT)}
    with local_slurm(nodes=1, shape=shape) as cluster:
        options = ("--partition=local", f"--output={tmp_path}/out", str(tmp_path / "x.sbatch"))
        job_id = cluster.submit(*options, cwd=ROOT, env={**env, **({"SLURM_HINT": hint} if hint else {})})
        job = cluster.wait_job(job_id)
    text = (tmp_path / "out").read_text()
    assert job["ExitCode"] == "0:0", text
    assert text.count("task of 7\n") == 8
    assert f"Nodes=1 CPUs={shape.job_cpus} Tasks=8" in text, text
    said = re.search(r"CPU_IDs=([\d,-]+)", text)
    assert said is not None
    cpus = [range(int(ends.split("-")[0]), int(ends.split("-")[-1]) + 1) for ends in said[1].split(",")]
    cores = {cpu // shape.threads_per_core for ids in cpus for cpu in ids}
    assert cores == {core for place in NODE for core in place.usable_cores}


def test_wrong_directory_is_explained(cluster: LocalSlurm, tmp_path) -> None:
    script = str(ROOT / "slurm" / "train_small.sbatch")
    job_id = cluster.submit(
        "-p", "local", "-C", "nvme", f"--output={tmp_path}/out", script, cwd=tmp_path, env={"FRONTIER_LLM_ROOT": ""}
    )
    assert cluster.wait_job(job_id)["ExitCode"] == "2:0"
    assert "run sbatch from the checkout" in (tmp_path / "out").read_text()


def job_sh(cluster: LocalSlurm, tmp_path: Path, env: dict[str, str]) -> tuple[dict[str, str], str]:
    """Run launch/job.sh with a module that prints which Python runs it. Returns the job and its output."""
    (tmp_path / "say.py").write_text(
        "import sys, os; print('python', sys.argv[1:], os.environ['FRONTIER_LLM_PYTHON'], flush=True)\n"
        "print('image', os.environ.get('FRONTIER_LLM_CONTAINER'), flush=True)\n"
        "print('shared image', os.environ.get('FRONTIER_LLM_SHARED_CONTAINER'), flush=True)"
    )
    script = tmp_path / "job.sh"
    script.write_text(f'#!/bin/bash\nexec {ROOT}/launch/job.sh "${{SITE:-local}}" say "a b"\n')
    job_id = cluster.submit(
        "-N1",
        "--ntasks-per-node=1",
        f"--output={tmp_path}/out",
        str(script),
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), **env},
    )
    return cluster.wait_job(job_id), (tmp_path / "out").read_text()


def make_archive(tmp_path: Path) -> Path:
    """Build an archive like conda-pack's: an environment whose bin/python works from any folder."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    for name, text in (
        ("python", f'#!/bin/bash\nexec {sys.executable} "$@"\n'),
        ("conda-unpack", '#!/bin/bash\ntouch "$(dirname "$0")/unpacked"\n'),
    ):
        (tmp_path / "env" / "bin" / name).write_text(text)
        (tmp_path / "env" / "bin" / name).chmod(0o755)
    archive = tmp_path / "env.tar.gz"
    subprocess.run(["tar", "-czf", str(archive), "-C", str(tmp_path / "env"), "."], check=True)
    return archive


def test_the_environment_is_broadcast_and_used(cluster: LocalSlurm, tmp_path: Path) -> None:
    job, text = job_sh(cluster, tmp_path, {"FRONTIER_LLM_ENV_ARCHIVE": str(make_archive(tmp_path))})
    said = re.search(rf"python \['a b'\] (/tmp/frontier_llm_env_{job['JobId']}_[0-9a-f]{{16}})/bin/python", text)
    assert said is not None and job["JobState"] == "COMPLETED", text
    target = Path(said[1])
    try:
        assert (target / "bin" / "unpacked").exists() and not (target / "env.tar.gz").exists()
        assert target.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(target, ignore_errors=True)


def test_an_image_is_broadcast_and_used(cluster: LocalSlurm, tmp_path: Path) -> None:
    image = tmp_path / "torch.sif"
    image.write_bytes(os.urandom(4096))
    env = {"FRONTIER_LLM_CONTAINER": str(image), "FRONTIER_LLM_BROADCAST_NODES": "1"}
    job, text = job_sh(cluster, tmp_path, env)
    said = re.search(rf"image (/tmp/frontier_llm_env_{job['JobId']}_[0-9a-f]{{16}})/image.sif", text)
    assert said is not None and job["JobState"] == "COMPLETED", text
    assert f"shared image {image}\n" in text
    try:
        assert (Path(said[1]) / "image.sif").read_bytes() == image.read_bytes()
    finally:
        shutil.rmtree(said[1], ignore_errors=True)


def test_a_failed_broadcast_ends_the_job(cluster: LocalSlurm, tmp_path: Path) -> None:
    job, text = job_sh(cluster, tmp_path, {"FRONTIER_LLM_ENV_ARCHIVE": "/nonexistent/env.tar.gz"})
    assert job["ExitCode"] == "2:0" and "conda-pack" in text
    archive = make_archive(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbcast").write_text("#!/bin/bash\necho no space left >&2\nexit 1\n")
    (tmp_path / "bin" / "sbcast").chmod(0o755)
    env = {"FRONTIER_LLM_ENV_ARCHIVE": str(archive), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    job, text = job_sh(cluster, tmp_path, env)
    for left in Path("/tmp").glob(f"frontier_llm_env_{job['JobId']}_*"):
        left.rmdir()
    assert job["JobState"] == "FAILED" and "sbcast ended with 1" in text and "python [" not in text


def test_unknown_site_and_missing_python_are_explained(cluster: LocalSlurm, tmp_path: Path) -> None:
    job, text = job_sh(cluster, tmp_path, {"SITE": "../evil"})
    assert job["ExitCode"] == "2:0" and "no slurm/sites/../evil.sh" in text
    (tmp_path / "out").unlink()
    job, text = job_sh(cluster, tmp_path, {"FRONTIER_LLM_PYTHON": "/nonexistent/python"})
    assert job["ExitCode"] == "2:0" and "FRONTIER_LLM_PYTHON=/path" in text
