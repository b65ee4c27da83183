"""What `frontier-llm submit` says about a site: unknown keys, limits, quotas and devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from frontier_llm.cli.main import main
from frontier_llm.cluster import slurm
from frontier_llm.cluster.code import code_digest, snapshot
from frontier_llm.cluster.sites import load_site, root_dir
from frontier_llm.cluster.submit import JobRequest, start_problems, wanted_job
from frontier_llm.config import load_run
from tests.harness.submissions import PRETRAIN_1T, SMALL

# values that a user of these sites could find with the commands in the messages
FOUND = {
    "partitions": {"gpu": [{"max_nodes": 40, "max_hours": 24}]},
    "bind": "gcd",
    "interface": "hsn0",
    "interfaces": ["hsn0", "hsn1", "hsn2", "hsn3"],
    "network_plugin": "librccl-net.so",
    "sbatch": {"constraint": "MI250", "exclusive": ""},
    "modules": ["rocm"],
    "node_local": "/tmp",
}


@pytest.mark.parametrize("site", ["setonix", "dardel", "adastra"])
def test_an_untested_site_asks_for_each_key_without_a_source(
    site: str,
    fake_slurm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(slurm, "cluster_name", lambda: None)
    words = ["submit", "train_small", "--nodes", "2", "-A", "project", "--dry-run", f"train.run_dir={tmp_path}/run"]
    shipped = root_dir() / "slurm" / "sites" / f"{site}.yaml"
    content = yaml.safe_load(shipped.read_text())
    assert main([*words, "--site", site]) == 2
    refusal = capsys.readouterr().err
    assert set(content["unknown"]) <= set(FOUND)
    for key in content["unknown"]:
        assert f"the file of {site} has no `{key}`" in refusal
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({**content, **{key: FOUND[key] for key in content["unknown"]}}))
    assert main([*words, "--site", str(own)]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in script and "#SBATCH --gpus-per-node=8" in script
    assert ("#SBATCH --constraint=MI250" in script) == (site == "adastra")
    assert ("#SBATCH --hint=nomultithread" in script) == (site == "dardel")


def test_debug_must_not_chain(fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OLCF prohibits production work and job chaining in the debug QOS."""
    words = [*SMALL, "--nodes", "1", "--qos", "debug", "--dry-run", f"train.run_dir={tmp_path}/r"]
    assert main(words) == 2
    assert "--continue-with never" in capsys.readouterr().err
    assert main([*words, "--continue-with", "never"]) == 0


@pytest.mark.thorough
def test_checkpoints_beyond_the_scratchs_quota_are_pointed_out(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """statvfs reports the capacity of all of Orion. A project may keep 50 TB on Orion, and a checkpoint of the 1T run
    has 12 TB.
    """
    words = [*PRETRAIN_1T, "--nodes", "384", "--dry-run", f"train.run_dir={tmp_path}/r", "train.steps=100"]
    assert main(words) == 0
    assert "50 TB" not in capsys.readouterr().err
    assert main([*words, "train.keep_checkpoints=3"]) == 0
    assert "up to 4 checkpoints of 12.1 TB exist at the same time, 48 TB in total" in capsys.readouterr().err
    # `train.keep_every` keeps three more checkpoints permanently
    assert main([*words, "train.steps=15259", "train.keep_every=5000"]) == 0
    assert "up to 6 checkpoints of 12.1 TB exist at the same time, 73 TB in total" in capsys.readouterr().err
    assert (
        main([*words, "train.keep_checkpoints=3", "train.save_interval=0", "train.save_final=false", "train.steps=5"])
        == 0
    )
    assert "50 TB" not in capsys.readouterr().err


@pytest.mark.thorough
def test_many_nodes_are_told_to_bring_their_environment(
    fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FRONTIER_LLM_CONTAINER", "FRONTIER_LLM_ENV_ARCHIVE"):
        monkeypatch.delenv(name, raising=False)

    def warning(site: str, nodes: int) -> str:
        """Return the warning of a dry run on another machine, where the installation is not checkable."""
        words = [
            "submit",
            "train_small",
            "--site",
            site,
            "--nodes",
            str(nodes),
            "-A",
            "A",
            "--dry-run",
            f"train.run_dir={tmp_path}/r",
        ]
        assert main([*words, f"batch.global_batch={64 * nodes}"]) == 0
        lines = capsys.readouterr().err.splitlines()
        return "".join(line for line in lines if "will import torch from" in line)

    assert warning("frontier", 64) and not warning("frontier", 8)
    assert "refuses" not in warning("frontier", 64)
    assert "submit refuses this for more than 64 nodes" in warning("frontier", 65)
    assert not warning("lumi", 16)  # a container image is one file, so there is no warning
    monkeypatch.setenv("FRONTIER_LLM_ENV_ARCHIVE", "env.tar.gz")
    assert not warning("frontier", 16)


def requested(nodes: int, directory: Path, **of_site: object) -> JobRequest:
    site = load_site("frontier").model_copy(update=of_site)
    config = load_run("train_22b", ["machine=frontier", f"train.run_dir={directory}/run"])
    return JobRequest(wanted_job(config, site, nodes), config, site)


def test_a_job_whose_connections_the_store_may_not_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRONTIER_LLM_CONTAINER", "image.sif")

    def refused(nodes: int, hard: int, **of_site: object) -> list[str]:
        request = requested(nodes, tmp_path, **of_site)
        return [str(problem) for problem in start_problems(request, lambda resource: (1024, hard))]

    assert refused(128, 4096) == []  # 128 nodes x 8 ranks x 4 connections
    (problem,) = refused(129, 4096)
    assert "1032 ranks open up to 4128 connections" in problem and "may open 4096 files (ulimit -Hn)" in problem
    assert "--nodes 128 or less" in problem
    assert refused(9408, -1) == []  # no limit
    assert refused(129, 4096, open_files=1_048_576) == [] and len(refused(129, 1_048_576, open_files=4096)) == 1


def test_many_nodes_may_not_import_torch_from_a_shared_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FRONTIER_LLM_CONTAINER", "FRONTIER_LLM_ENV_ARCHIVE"):
        monkeypatch.delenv(name, raising=False)

    def refused(nodes: int, **of_site: object) -> bool:
        problems = start_problems(requested(nodes, tmp_path, **of_site), lambda resource: (1024, -1))
        return any("would import torch from a shared file system" in problem.what for problem in problems)

    assert not refused(64) and refused(65)
    assert not refused(65, environment_is_local=True)
    assert not refused(65, bind="none")
    monkeypatch.setenv("FRONTIER_LLM_ENV_ARCHIVE", "env.tar.gz")
    assert not refused(65)


def test_fp16_on_mi250x_is_pointed_out(fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--nodes", "1", "--dry-run", f"train.run_dir={tmp_path}/r"]
    for dtype, noted in (("fp16", True), ("bf16", False)):
        assert main([*words, f"precision.dtype={dtype}"]) == 0
        assert ("treat numbers below 6.1e-5 as zero" in capsys.readouterr().err) is noted


@pytest.mark.thorough
def test_a_device_from_a_test_at_home_is_pointed_out(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--nodes", "1", "--dry-run", f"train.run_dir={tmp_path}/r"]
    for device, noted in (("cpu", True), ("auto", False), ("cuda", False)):
        assert main([*words, f"train.device={device}"]) == 0
        assert ("train.device=cpu leaves the GPUs of frontier idle" in capsys.readouterr().err) is noted
    for dtype, noted in (("fp32", True), ("fp64", True), ("bf16", False)):
        assert main([*words, f"precision.dtype={dtype}"]) == 0
        assert ("a quarter of the matrix rate" in capsys.readouterr().err) is noted


def test_a_site_from_elsewhere_travels_with_the_code(tmp_path: Path) -> None:
    site = load_site("local").model_copy(update={"name": "mine", "environment": {"A": "b"}})
    snapshot(tmp_path / "code", site)
    assert "export A=b" in (tmp_path / "code" / "slurm" / "sites" / "mine.sh").read_text()
    assert load_site(str(tmp_path / "code" / "slurm" / "sites" / "mine.yaml")) == site
    assert code_digest(site) != code_digest(load_site("local"))


def test_another_machine_prints_the_open_points_and_queues_nothing(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--nodes", "1", f"train.run_dir={tmp_path}/r", f"data.train=[{{path: {tmp_path}/tokens}}]"]
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr()
    point = (
        "not checkable here: this is cluster here, but frontier is cluster frontier. `submit` on the site checks "
        "torch and its build"
    )
    assert point in shown.err and shown.out.startswith("#!/bin/bash")
    assert main(words) == 1
    assert "not checkable here" in capsys.readouterr().err
    (fake_slurm.parent / "bin" / "scontrol").write_text("#!/bin/bash\nexit 1\n")
    assert main([*words, "--dry-run"]) == 0
    assert "Slurm does not respond, so this is not a login node of frontier" in capsys.readouterr().err
    assert main(words) == 1
    assert "sbatch" not in fake_slurm.read_text() and not (tmp_path / "r").exists()


def test_a_run_directory_off_the_scratch_is_pointed_out(
    fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = tmp_path / "lustre" / "abc123" / "me"
    scratch.mkdir(parents=True)
    monkeypatch.setenv("USER", "me")
    site = tmp_path / "mine.yaml"
    text = (root_dir() / "slurm" / "sites" / "frontier.yaml").read_text()
    site.write_text(text.replace("/lustre/orion/$PROJECT/scratch/$USER", f"{tmp_path}/lustre/$PROJECT/$USER"))
    for run_dir_, noted in ((tmp_path / "home" / "r", True), (scratch / "r", False)):
        words = [
            "submit",
            "train_small",
            "--site",
            str(site),
            "-A",
            "ABC123",
            "--nodes",
            "1",
            "--dry-run",
            f"train.run_dir={run_dir_}",
        ]
        assert main(words) == 0
        assert (f"train.run_dir={scratch}/r" in capsys.readouterr().err) is noted
