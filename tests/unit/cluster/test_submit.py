from __future__ import annotations

import json
import re
import shlex
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from frontier_llm.certificate import memory as certificate_memory
from frontier_llm.cli.main import main
from frontier_llm.cluster import slurm
from frontier_llm.cluster.code import code_digest, snapshot
from frontier_llm.cluster.sites import load_site, root_dir
from frontier_llm.cluster.submit import JobRequest, before_maintenance, start_problems, wanted_job
from frontier_llm.cluster.warning_time import next_warning_s, save_seconds
from frontier_llm.config import load_run
from frontier_llm.errors import Problem
from frontier_llm.planner.predict import START_S, PointPrediction, walltime_minutes
from frontier_llm.run import run_dir
from frontier_llm.run.holder import reserved, this_process
from frontier_llm.run.job import read_job


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands that record their arguments. tests/slurm uses the real commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    log = tmp_path / "calls"
    answers = {"sbatch": "4711", "squeue": "", "scontrol": "JobId=1 JobState=COMPLETED\nClusterName = here"}
    for name, answer in answers.items():
        script = commands / name
        script.write_text(
            f'#!/bin/bash\nprintf "%s " {name} "$@" >> {shlex.quote(str(log))}\necho >> '
            f"{shlex.quote(str(log))}\necho {shlex.quote(answer)}\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    log.touch()
    return log


SMALL = ["submit", "train_small", "--site", "frontier", "-A", "ABC123"]
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


PRETRAIN_1T = [
    "submit",
    "pretrain_1t",
    "--site",
    "frontier",
    "-A",
    "A",
    "data.train=synthetic",
    "data.allow_synthetic=true",
]


@pytest.fixture
def here(tmp_path: Path) -> list[str]:
    """`SMALL` on the cluster of `fake_slurm`. Its ranks compute on CPUs, so everything that they need is installed."""
    content = yaml.safe_load((root_dir() / "slurm" / "sites" / "frontier.yaml").read_text())
    content |= {"name": "here", "cluster": "here", "machine": "local", "bind": "none", "node_local": str(tmp_path)}
    content |= {"modules": [], "unset": [], "environment": {}, "run_roots": []}
    (tmp_path / "here.yaml").write_text(yaml.safe_dump(content))
    return ["submit", "train_small", "--site", str(tmp_path / "here.yaml"), "-A", "ABC123"]


def test_everything_wrong_is_said_before_sbatch_is_called(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "submit",
        "train_1t",
        "--site",
        "frontier",
        "--nodes",
        "500",
        "--time",
        "20:00:00",
        f"train.run_dir={tmp_path}/r",
    ]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert (
        "-A PROJECT" in err
        and "at most 12:00:00" in err
        and "500 nodes of 8 ranks cannot be divided into replicas" in err
        and "--nodes 448 or 512" in err
    )
    assert fake_slurm.read_text() == "" and not (tmp_path / "r").exists()


@pytest.mark.parametrize("flag", ["--account", "--partition", "--qos"])
def test_names_that_could_be_more_are_refused(fake_slurm: Path, tmp_path: Path, flag: str) -> None:
    assert main([*SMALL, "--nodes", "1", flag, "x;reboot", f"train.run_dir={tmp_path}/r"]) == 2
    assert "sbatch" not in fake_slurm.read_text()


def test_dry_run_writes_and_queues_nothing(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--nodes", "1", "--dry-run", f"train.run_dir={tmp_path}/r"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash") and "#SBATCH --time=" in out
    calls = fake_slurm.read_text().splitlines()
    assert sorted(calls) == ["scontrol show config ", "scontrol show reservation --oneliner "]
    assert not (tmp_path / "r").exists()


def test_a_submission_freezes_code_and_configuration(
    fake_slurm: Path, here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "a run"
    run_dir.add_bad_hosts(directory, ["n3"])
    run_dir.distrust(directory, ["n6"])
    assert (
        main(
            [
                *here,
                "--nodes",
                "1",
                "--spares",
                "1",
                "--exclude",
                "n[4-5]",
                "--json",
                f"train.run_dir={directory}",
                "train.steps=7",
            ]
        )
        == 0
    )
    made = json.loads(capsys.readouterr().out)
    assert made["job_id"] == "4711"
    assert "--account=ABC123" in made["command"] and "--exclude=n[3-6]" in made["command"]
    assert "sbatch --parsable" in fake_slurm.read_text()
    assert made["variables"]["FRONTIER_LLM_PYTHON"] == sys.executable  # not the python3 of the site's modules
    code = Path(made["variables"]["FRONTIER_LLM_ROOT"])
    assert (
        code.name == f"code-{code_digest(load_site(str(tmp_path / 'here.yaml')))[:12]}"
        and (code / "launch" / "job.sh").stat().st_mode & stat.S_IXUSR
    )
    assert (code / "frontier_llm" / "cluster" / "submit.py").is_file()
    script = (directory / "job.sbatch").read_text()
    assert "#SBATCH --nodes=2" in script and f"'--run-dir={directory}'" in script
    job = read_job(directory)
    assert job is not None and (job.nodes, job.spares, job.continuation, job.site) == (1, 1, "requeue", "here")
    assert job.words == (f"{directory}/run.yaml", "machine=local", "ops.no_jit=true")
    assert f"#SBATCH --signal=USR1@{job.warning_s:.0f}" in script
    assert set(made["variables"]) == {"FRONTIER_LLM_PYTHON", "FRONTIER_LLM_ROOT", "FRONTIER_LLM_SITE"}
    assert not (directory / "submit.lock").exists()
    train = yaml.safe_load((directory / "run.yaml").read_text())["train"]
    assert (train["steps"], train["run_dir"]) == (7, str(directory))


@pytest.mark.parametrize("by", ["a living process", "a record of another run"])
def test_a_directory_that_is_not_free_is_left_as_it_is(
    fake_slurm: Path, here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    directory = tmp_path / "run"
    words = [*here, "--nodes", "1", f"train.run_dir={directory}"]
    assert main(words) == 0
    fake_slurm.write_text("")
    path = directory / "job.json"
    before = path.read_text()
    if by == "a living process":
        with reserved(directory):
            assert main([*words, "--spares", "3"]) == 2
        assert "is being submitted by a process on" in capsys.readouterr().err
    else:
        before = before.replace(str(directory), str(tmp_path / "other"))
        path.write_text(before)
        assert main([*words, "--spares", "3"]) == 2
        assert "the record of another run" in capsys.readouterr().err
    assert path.read_text() == before and "sbatch" not in fake_slurm.read_text()


@pytest.mark.usefixtures("fake_slurm")
def test_a_dead_process_does_not_keep_the_directory(here: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    dead = replace(this_process(), process_start="1")
    (directory / "submit.lock").write_bytes(dead.to_bytes())
    assert main([*here, "--nodes", "1", f"train.run_dir={directory}"]) == 0
    assert not (directory / "submit.lock").exists()


@pytest.mark.usefixtures("fake_slurm")
def test_a_queued_job_reads_the_plugin_as_it_was(
    here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    plugin = tmp_path / "mine.py"
    roots = []
    for content in ("x = 1\n", "x = 2\n"):  # edited while the first job waits
        plugin.write_text(content)
        words = [f"train.run_dir={directory}", f"plugins=[{plugin}]"]
        assert main([*here, "--nodes", "1", "--json", *words]) == 0
        roots.append(Path(json.loads(capsys.readouterr().out)["variables"]["FRONTIER_LLM_ROOT"]))
        frozen = roots[-1] / "plugins" / "0" / "mine.py"
        assert yaml.safe_load((directory / "run.yaml").read_text())["plugins"] == [str(frozen.relative_to(directory))]
        assert load_run(str(directory / "run.yaml")).plugins == (str(frozen),)
    assert [(root / "plugins" / "0" / "mine.py").read_text() for root in roots] == ["x = 1\n", "x = 2\n"] and roots[
        0
    ] != roots[1]


def test_a_snapshot_that_is_there_is_used_again(tmp_path: Path) -> None:
    target = tmp_path / "code"
    site = load_site("local")
    snapshot(target, site)
    (target / "mark").touch()
    snapshot(target, site)
    assert (target / "mark").exists() and not list(tmp_path.glob("*.tmp*"))


def test_a_snapshot_holds_the_bytecode_that_ranks_would_each_write(tmp_path: Path) -> None:
    snapshot(tmp_path / "code", load_site("local"))
    package = tmp_path / "code" / "frontier_llm" / "training"
    sources = {path.stem for path in package.glob("*.py")}
    compiled = {path.name.split(".")[0] for path in (package / "__pycache__").glob("*.pyc")}
    assert compiled == sources and "loop" in sources


def test_debug_must_not_chain(fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OLCF prohibits production work and job chaining in the debug QOS."""
    words = [*SMALL, "--nodes", "1", "--qos", "debug", "--dry-run", f"train.run_dir={tmp_path}/r"]
    assert main(words) == 2
    assert "--continue-with never" in capsys.readouterr().err
    assert main([*words, "--continue-with", "never"]) == 0


def test_checkpoints_beyond_the_scratchs_quota_are_pointed_out(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """statvfs reports the capacity of all of Orion. A project may keep 50 TB there, and a checkpoint of the 1T run has
    12 TB.
    """
    words = [*PRETRAIN_1T, "--nodes", "384", "--dry-run", f"train.run_dir={tmp_path}/r", "train.steps=100"]
    assert main(words) == 0
    assert "50 TB" not in capsys.readouterr().err
    assert main([*words, "train.keep_checkpoints=3"]) == 0
    assert "up to 4 checkpoints of 12.1 TB exist at the same time, 48 TB in total" in capsys.readouterr().err
    assert main([*words, "train.steps=15259", "train.keep_every=5000"]) == 0  # three more that are kept permanently
    assert "up to 6 checkpoints of 12.1 TB exist at the same time, 73 TB in total" in capsys.readouterr().err
    assert (
        main([*words, "train.keep_checkpoints=3", "train.save_interval=0", "train.save_final=false", "train.steps=5"])
        == 0
    )
    assert "50 TB" not in capsys.readouterr().err


def test_many_nodes_are_told_to_bring_their_environment(
    fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FRONTIER_LLM_CONTAINER", "FRONTIER_LLM_ENV_ARCHIVE"):
        monkeypatch.delenv(name, raising=False)

    def noted(site: str, nodes: int) -> bool:
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
        assert main([*words, "batch.global_batch=64"]) == 0
        return "will import torch from" in capsys.readouterr().err

    assert noted("frontier", 16) and not noted("frontier", 8)
    assert not noted("lumi", 16)  # an image is one file
    monkeypatch.setenv("FRONTIER_LLM_ENV_ARCHIVE", "env.tar.gz")
    assert not noted("frontier", 16)


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


def test_lead_time_follows_the_measured_save(tmp_path: Path) -> None:
    frontier = load_site("frontier")
    assert next_warning_s(tmp_path, frontier) == 600
    assert next_warning_s(tmp_path, frontier, expected_step_s=576.0) == 600 + 2 * 576 + 18
    rows = [
        {"kind": "step", "step": 1, "loss": 1.0, "time": 100.0, "step_time_s": 30.0},
        {"kind": "save", "step": 1, "time": 190.0},
    ]
    rows += [
        {"kind": "step", "step": 2, "loss": 1.0, "time": 220.0, "step_time_s": 30.0},
        {"kind": "save", "step": 9, "time": 900.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert save_seconds(tmp_path) == [90.0]
    assert next_warning_s(tmp_path, frontier) == 300  # 2 x (30 + 90) + 60


def test_overrides_without_equals_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "train_small", "train.steps", "--site", "local", "--nodes", "1"]) == 2
    assert "not of the form key=value" in capsys.readouterr().err


def test_a_token_target_is_the_length_of_the_run(
    fake_slurm: Path, here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    words = [
        *here,
        "--nodes",
        "1",
        "train.steps=1M tokens",
        "--allow-change",
        "train.steps",
        f"train.run_dir={directory}",
    ]
    assert main(words) == 0
    # The length is written in tokens, because a batch size that changes during the run changes the number of steps.
    assert "steps: 1000000 tokens\n" in (directory / "run.yaml").read_text()
    job = read_job(directory)
    assert job is not None and job.flags == ("--allow-change", "train.steps")


def test_the_signal_leads_by_more_than_a_predicted_step(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*PRETRAIN_1T, "--nodes", "384", "--dry-run", f"train.run_dir={tmp_path}/r"]
    assert main(words) == 0
    (signal,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#SBATCH --signal")]
    assert int(signal.rpartition("@")[2]) > 600 + 2 * 500


def test_a_walltime_that_saving_would_eat_is_refused(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*PRETRAIN_1T, "--nodes", "384", "--dry-run", f"train.run_dir={tmp_path}/r"]
    assert main([*words, "--time", "0:30:00"]) == 2
    fix = capsys.readouterr().err.rpartition("--time ")[2].split()[0]
    assert main([*words, "--time", fix]) == 0


def test_a_way_out_lies_within_the_bin(fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On 64 nodes a step of ORNL's full batch takes nearly an hour, and a job of 64 nodes may run for two hours."""
    few = ["batch.micro_batch=8"]  # an eighth of the microbatches, which the certificate checks one by one
    words = [*PRETRAIN_1T, *few, "--nodes", "64", "--dry-run", f"train.run_dir={tmp_path}/r"]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "smaller batch.global_batch" in err and "--partition extended" in err and "from 92 nodes" in err
    assert main([*words, "batch.global_batch=1600"]) == main([*words, "--partition", "extended"]) == 0
    assert main([*words, "--time", "0"]) == 2


def test_a_job_gets_the_walltime_of_its_own_partition(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["data.train=synthetic", "data.allow_synthetic=true", "train.steps=10000000"]
    words = [*SMALL, "--nodes", "1", "--dry-run", *data, f"train.run_dir={tmp_path}/r"]
    for partition, walltime in (("batch", "02:00:00"), ("extended", "1-00:00:00")):
        assert main([*words, "--partition", partition]) == 0
        shown = capsys.readouterr()
        assert f"#SBATCH --time={walltime}\n" in shown.out and f"{walltime} per job" in shown.err


def test_data_that_is_not_there_is_found_before_the_queue(
    fake_slurm: Path, here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*here, "--nodes", "1", f"train.run_dir={tmp_path}/r", f"data.train=[{{path: {tmp_path}/tokens}}]"]
    assert main(words) == 1
    assert "tokens.bin: no such file, nor tokens.idx" in capsys.readouterr().err
    assert "sbatch" not in fake_slurm.read_text() and not (tmp_path / "r").exists()


def test_a_refused_dry_run_still_prints_the_script(
    fake_slurm: Path, here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*here, "--nodes", "1", "--dry-run", f"train.run_dir={tmp_path}/r"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert main([*words, "data.tokenizer=/nowhere/tokenizer.json"]) == 1
    refused = capsys.readouterr()
    assert refused.out == shown.out and shown.out.startswith("#!/bin/bash")
    assert "/nowhere/tokenizer.json" in refused.err and "would refuse" not in shown.err
    assert main([*words, "--json", "data.tokenizer=/nowhere/tokenizer.json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["is_checkable"] and report["problems"][0]["where"] == "/nowhere/tokenizer.json"


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


def request_of_10_hours(directory: Path) -> JobRequest:
    """Return a request on 384 nodes of Frontier.

    It needs ten hours: 60 steps of 400 s, times the safety factor of 1.5.
    """
    config = load_run("pretrain_1t", [f"train.run_dir={directory}", "train.steps=60"])
    site = load_site("frontier")
    predicted = PointPrediction(
        step_time_s=400.0, tokens_per_s=1.0, peak_bytes=1.0, limit_bytes=1.0, machine="frontier", band=0.17
    )
    return JobRequest(wanted_job(config, site, 384), config, site).with_prediction(predicted)


def test_the_walltime_is_what_the_run_needs(tmp_path: Path) -> None:
    """1.5 x simulated, or the slow end of a wider band; never more than the bin; less for steps that are saved."""
    request = request_of_10_hours(tmp_path)
    warning_s = request.job.warning_s
    assert request.job_s == START_S + 60 * 400 * 1.5
    assert request.slice_minutes == walltime_minutes(START_S + 36000 + warning_s) < 12 * 60
    wide = PointPrediction(400.0, 1.0, 1.0, 1.0, "frontier", band=0.56)
    assert request.with_prediction(wide).job_s == pytest.approx(START_S + 60 * 400 * 1.56)
    assert replace(request, job_s=1e6).slice_minutes == 12 * 60
    assert replace(request, minutes=75).slice_minutes == 75
    assert replace(request, job_s=0.0).slice_minutes == walltime_minutes(2 * warning_s)


@pytest.mark.parametrize(
    ("hours_until", "minutes"),
    [(24.0, None), (6.0, 6 * 60 - 5), (0.3, None)],
    ids=["far away", "during the job", "too soon to train"],
)
def test_a_job_ends_before_a_maintenance(tmp_path: Path, hours_until: float, minutes: int | None) -> None:
    request = request_of_10_hours(tmp_path)
    maintenance = slurm.Maintenance("maint_1", 3600.0 * hours_until)
    shortened = before_maintenance(request, 0.0, maintenance)
    assert shortened.shortened_minutes == minutes
    assert before_maintenance(replace(request, minutes=600), 0.0, maintenance).shortened_minutes is None
    assert before_maintenance(request, 0.0, None) == request


def test_the_first_job_alone_is_shortened_and_a_successor_follows(
    fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm, "next_maintenance", lambda now: slurm.Maintenance("maint_1", now + 3600 * 6))
    words = [*PRETRAIN_1T, "--nodes", "384", "--dry-run", "--json", f"train.run_dir={tmp_path}/r"]
    assert main(words) == 0
    shown = capsys.readouterr()
    submission = json.loads(shown.out)
    assert "--time=354" in submission["command"] or "--time=355" in submission["command"]
    assert "#SBATCH --time=12:00:00\n" in submission["script"]
    assert submission["job"]["continuation"] == "successor"
    assert "maintenance maint_1 begins at " in shown.err


def test_the_same_run_on_other_node_counts(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*PRETRAIN_1T, "--nodes", "384", "--dry-run", "--compare-nodes", "192", "--compare-nodes", "100"]
    assert main([*words, f"train.run_dir={tmp_path}/r"]) == 0
    err = capsys.readouterr().err
    rows = {line.split()[0]: line.split()[1:] for line in err.splitlines() if re.match(r"\s+(192|384) ", line)}
    assert set(rows) == {"192", "384"} and "100 nodes: " in err
    assert float(rows["192"][0]) > float(rows["384"][0])  # seconds per step
    assert int(rows["192"][1]) > int(rows["384"][1])  # jobs
    assert rows["384"][-1] == "unknown"


def test_further_options_of_sbatch_are_passed_on_and_recorded(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--sbatch", "mail-type=END", "--sbatch", "comment=it's $(mine)"]
    words = [*SMALL, "--nodes", "1", "--dry-run", "--json", *options, f"train.run_dir={tmp_path}/r"]
    assert main(words) == 0
    submission = json.loads(capsys.readouterr().out)
    assert {"--mail-type=END", "--comment=it's $(mine)"} <= set(submission["command"])
    assert submission["job"]["sbatch"] == ["mail-type=END", "comment=it's $(mine)"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        *[(f"{name}=x", f"{name} is set by the framework") for name in ("signal", "requeue", "open-mode", "output")],
        *[(f"{name}=x", f"{name} is set by the framework") for name in ("chdir", "export", "array", "wrap")],
        ("sig=USR1@5", "signal is set by the framework"),  # sbatch accepts the beginning of a name
        ("nodes=3", "use --nodes and --spares"),
        ("dependency=after:1", "use --dependency"),
        ("time=5", "use --time"),
        ("mail-type", "'mail-type' is not KEY=VALUE"),
        ("--mail-type=END", "without dashes"),
        ("comment=a\nb", "is not KEY=VALUE"),
    ],
)
def test_options_that_the_framework_owns_are_refused_by_name(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    assert main([*SMALL, "--nodes", "1", f"--sbatch={word}", f"train.run_dir={tmp_path}/r"]) == 2
    assert message in capsys.readouterr().err and "sbatch" not in fake_slurm.read_text()


def test_a_webhook_that_others_can_read_is_refused_before_the_queue(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = tmp_path / "hook"
    hook.write_text("https://chat/secret")
    hook.chmod(0o644)
    words = [*SMALL, "--nodes", "1", "--dry-run", "--json", "--webhook-file", str(hook), f"train.run_dir={tmp_path}/r"]
    assert main(words) == 2 and "has mode 0644" in capsys.readouterr().err
    hook.chmod(0o600)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown)["job"]["webhook_file"] == str(hook) and "secret" not in shown


def test_a_section_that_is_not_checkable_here_is_submitted_only_by_force(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--nodes", "1", f"train.run_dir={tmp_path}/r"]
    assert main([*words, "--force", "memory"]) == 1  # the installation is still not checkable
    assert "--force installation submits without this section" in capsys.readouterr().err
    assert main([*words, "--force", "instalation"]) == 2
    assert "did you mean 'installation'" in capsys.readouterr().err
    assert "sbatch" not in fake_slurm.read_text() and not (tmp_path / "r").exists()
    assert main([*words, "--force", "installation"]) == 0
    job = read_job(tmp_path / "r")
    assert job is not None and job.forced == ("installation",)


def test_force_does_not_pass_a_refused_section(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*SMALL, "--nodes", "1", f"train.run_dir={tmp_path}/r", "--force", "cost", "--force", "installation"]
    assert main([*words, "--max-node-hours", "0.01"]) == 2
    assert "node-hours are too few" in capsys.readouterr().err
    refusal = Problem(where="cost", what="is too high", fix="take fewer nodes")
    monkeypatch.setattr(certificate_memory, "cost_problems", lambda *arguments: [refusal])
    assert main(words) == 1
    assert "cost: is too high" in capsys.readouterr().err
    assert "sbatch" not in fake_slurm.read_text()
