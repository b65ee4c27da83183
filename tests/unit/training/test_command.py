"""The command `frontier-llm train`: refusals before ranks start, resume on another layout, and a common end of all
ranks.
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain, permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.cli import checks
from frontier_llm.cli import main as command_line
from frontier_llm.cli.ranks import local_world_size
from frontier_llm.cluster import disk
from frontier_llm.config import load_run
from frontier_llm.errors import ConfigError
from frontier_llm.units import format_bytes

TINY = {
    "model": {"base": "llama-tiny"},
    "batch": {"global_batch": 8, "micro_batch": 2},
    "optimizer": {"lr": 1e-3, "schedule": "constant"},
    "precision": {"dtype": "fp32"},
    "train": {"steps": 4, "device": "cpu", "tensorboard": False},
}


@pytest.fixture
def run_file(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


def train(run_file: Path, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "frontier_llm.cli.main", "train", str(run_file), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize(
    "words", list(permutations((["a=1", "b=2"], ["--strict"], ["--allow-change", "optimizer.lr"], ["c=3"])))
)
def test_options_may_stand_anywhere_after_the_run(words):
    parsed = command_line.parse(["train", "run.yaml", *chain(*words)])
    assert parsed.run == "run.yaml" and sorted(parsed.overrides) == ["a=1", "b=2", "c=3"]
    assert parsed.strict and parsed.allow_change == ["optimizer.lr"]


def losses(run_dir: Path) -> dict[int, float]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["optimizer.learning_rate=1"], ["optimizer.learning_rate", "unknown key", "lr"]),
        (
            ["model.heads=3", "parallel.tensor=4"],
            ["model.heads", "does not divide hidden 64", "kv_heads", "not divisible by tensor 4"],
        ),
        (["parallel.pipeline=5"], ["5 stages", "4 layers"]),
        (["parallel.data=3", "batch.global_batch=8"], ["batch.global_batch", "6 or 12"]),
        (["data.train=[{path: /nowhere/text}]"], ["/nowhere/text"]),
        (["data.train=syntetic"], ["data.train: there is no dataset 'syntetic'", "did you mean data.train=synthetic?"]),
        (
            ["optimizer.schedule=cosine", "optimizer.lr=1e-5"],
            ["optimizer.min_lr: 3e-05 is above optimizer.lr 1e-05", "set optimizer.min_lr=1e-06"],
        ),
        (["data.validation=[]"], ["data.validation: is an empty list", "or write null"]),
        (
            ["train.run_dir=$SCRATCH/run"],
            ["command line: train.run_dir: must be a path without variables", "got '$SCRATCH/run'"],
        ),
        (["train.device=gpu"], ["did you mean 'cuda'?"]),
        (["train.run_dir=/proc/run"], ["train.run_dir", "cannot be written"]),
        (["train.run_dir=/proc/version/run"], ["/proc/version/run cannot be written: /proc/version is a file"]),
        (["comm.algorithms=nope"], ["comm.algorithms", "no algorithm file 'nope'", "frontier"]),
        (["machine=fronteir"], ["no machine file", "did you mean 'frontier'"]),
        (["train.steps"], ["train.steps", "key=value"]),
    ],
)
def test_bad_input_is_refused_before_ranks_start(run_file, tmp_path, capsys, arguments, expected):
    assert command_line.main(["train", str(run_file), f"train.run_dir={tmp_path / 'run'}", *arguments]) == 2
    said = capsys.readouterr().err
    for words in expected:
        assert words in said
    assert not (tmp_path / "run" / "logs").exists(), "no rank was started"


@pytest.mark.thorough
def test_a_users_own_config_yaml_is_not_overwritten(run_file, tmp_path, capsys):
    own = run_file.rename(tmp_path / "config.yaml")
    words = ["train", str(own), f"train.run_dir={tmp_path}", "--dry-run"]
    assert command_line.main(words) == 1
    said = capsys.readouterr()
    assert "config.yaml does not belong to a run, and a run there would overwrite it" in said.out
    assert f"train --dry-run is now this command: frontier-llm check {own} train.run_dir={tmp_path}" in said.err
    (tmp_path / "checkpoints").mkdir()
    assert command_line.main(words) == 0  # checkpoints/ shows that a run was there


def test_every_problem_is_reported_at_once(run_file, tmp_path, capsys):
    wrong = ["model.kv_heads=3", "parallel.chunks=2", "batch.global_batch=7"]
    assert command_line.main(["train", str(run_file), f"train.run_dir={tmp_path / 'run'}", *wrong]) == 2
    said = capsys.readouterr().err
    for words in ("model.kv_heads", "parallel.chunks", "batch.global_batch"):
        assert words in said


@pytest.mark.thorough
def test_a_run_goes_on_where_it_stopped_on_another_layout(run_file, tmp_path):
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    assert train(run_file, f"train.run_dir={whole}").returncode == 0
    two_stages = ["parallel.pipeline=2", "parallel.schedule=zb-h1"]
    assert train(run_file, f"train.run_dir={parts}", "train.steps=2", *two_stages).returncode == 0
    done = train(run_file, f"train.run_dir={parts}", "parallel.tensor=2", "parallel.sequence_parallel=true")
    assert done.returncode == 0 and "resuming after step 2" in done.stderr
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    again = train(run_file, f"train.run_dir={whole}")
    assert again.returncode == 0 and "resuming after step 4" in again.stderr
    assert "nothing to train: 4 steps are done, and train.steps is 4" in again.stderr
    changed = [f"train.run_dir={parts}", "optimizer.lr=2e-3", "parallel.tensor=2"]
    logs = (parts / "logs" / "rank_0.log").stat()
    refused = train(run_file, *changed)
    assert refused.returncode == 2 and refused.stderr.count("optimizer.lr: 0.001 → 0.002") == 1
    assert "add --allow-change optimizer.lr" in refused.stderr
    assert (parts / "logs" / "rank_0.log").stat() == logs, "no rank was started"
    assert train(run_file, *changed, "--allow-change", "optimizer.lr", "--dry-run").returncode == 0


def test_a_stop_file_from_before_is_not_obeyed_in_silence(run_file, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    assert command_line.main(["train", str(run_file), f"train.run_dir={tmp_path}/run"]) == 2
    assert f"fix: rm {tmp_path}/run/STOP" in capsys.readouterr().err


@pytest.mark.parametrize(("spare_bytes", "dtype"), [(0, "bf16"), (-1, "bf16"), (0, "fp32"), (-1, "fp32")])
def test_a_model_that_memory_cannot_hold_is_refused(tmp_path, monkeypatch, spare_bytes, dtype):
    config = load_run(
        "quickstart",
        [f"train.run_dir={tmp_path}", f"precision.dtype={dtype}", "parallel.pipeline=1", "train.device=cpu"],
    )
    weight_bytes = 2 if dtype == "bf16" else 4
    # Three replicas, each of two ranks, hold weights and gradients. They share one copy of the optimizer state.
    held = total_parameters(config.model) * (3 * (weight_bytes + 4) + 12) + spare_bytes
    assert 0 < checks.available_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(checks, "available_bytes", lambda: held)
    monkeypatch.setattr(checks, "GPU_FILES", {})
    if spare_bytes == 0:
        return checks.check_start(config, 6)
    with pytest.raises(
        ConfigError,
        match=r"optimizer state of 6 ranks take .*of free memory and no GPU\n    fix: use a smaller model",
    ):
        checks.check_start(config, 6)


@pytest.mark.parametrize(
    ("machine", "device", "driver", "refused"),
    [
        ("local", "cuda", None, True),
        ("local", "cuda", "nvidia", False),
        ("local", "auto", None, False),
        ("frontier", "auto", None, True),
        ("frontier", "auto", "nvidia", True),
        ("frontier", "auto", "amd", False),
        ("frontier", "cuda", "nvidia", True),
        ("frontier", "cpu", None, False),
        ("h200", "auto", "amd", True),
    ],
)
def test_a_gpu_is_refused_where_there_is_none(tmp_path, monkeypatch, machine, device, driver, refused):
    """The driver's file is checked before torch is imported."""
    (tmp_path / "there").touch()
    files = {vendor: str(tmp_path / ("there" if vendor == driver else "missing")) for vendor in ("amd", "nvidia")}
    monkeypatch.setattr(checks, "GPU_FILES", files)
    config = load_run(
        "quickstart",
        ["precision.dtype=bf16", f"train.run_dir={tmp_path}", f"train.device={device}", f"machine={machine}"],
    )
    if not refused:
        return checks.check_start(config, 4)
    expected = (
        rf"train.device: is {device}, which means a GPU on machine={machine}, but this computer has "
        rf"none[\s\S]*machine=local"
    )
    with pytest.raises(ConfigError, match=expected):
        checks.check_start(config, 4)


@pytest.mark.parametrize(("number", "waits"), [(signal.SIGTERM, False), (signal.SIGUSR1, True)])
def test_sigterm_ends_a_command_that_still_checks_its_run(run_file, tmp_path, number, waits):
    """A plugin simulates a slow check. A batch script's warning signal is held back until the command can handle it."""
    (tmp_path / "slow.py").write_text("import time\nprint('checking', flush=True)\ntime.sleep(600)\n")
    command = [
        sys.executable,
        "-m",
        "frontier_llm.cli.main",
        "train",
        str(run_file),
        f"plugins=[{tmp_path / 'slow.py'}]",
        "--dry-run",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "checking\n"
            process.send_signal(number)
            if waits:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                masks = {
                    line.split()[0]: int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "ShdPnd"))
                }
                bit = 1 << (number - 1)
                # A process that was ended by this signal still shows it as pending, but blocks no signal.
                assert masks["SigBlk:"] & bit and masks["ShdPnd:"] & bit
            else:
                assert process.wait(60) == -number
        finally:
            process.kill()


@pytest.mark.thorough
def test_ranks_that_torchrun_has_started_train(run_file, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "frontier_llm.cli.main"]
    words = ["train", str(run_file), f"train.run_dir={tmp_path}/run", "parallel.data=2", "train.steps=2"]
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(losses(tmp_path / "run")) == [1, 2]


@pytest.mark.thorough
def test_one_dead_rank_ends_all_and_is_named_last(run_file, tmp_path):
    run_dir = tmp_path / "run"
    overrides = [f"train.run_dir={run_dir}", "train.steps=100000", "parallel.pipeline=2", "train.log_interval=100"]
    command = [sys.executable, "-m", "frontier_llm.cli.main", "train", str(run_file), *overrides]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 200
        while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").stat().st_size:
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.2)
        children = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
        assert len(children) == 2
        os.kill(children[1], signal.SIGKILL)
        _, errors = parent.communicate()  # pytest's limit is shorter than train.timeout_s, 600 s
    finally:
        parent.kill()
    assert parent.returncode == 128 + signal.SIGKILL
    assert "rank 1" in errors.strip().splitlines()[-1] and "SIGKILL" in errors.strip().splitlines()[-1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_a_rank_that_is_done_is_not_killed_by_a_late_warning(run_file, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr("frontier_llm.training.loop.train", lambda *arguments: 0)
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 20001,
    }.items():
        monkeypatch.setenv(name, str(value))
    try:
        assert command_line.main(["train", str(run_file), f"train.run_dir={tmp_path / 'run'}"]) == 0
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_saves_nothing_needs_no_room_for_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(
        disk.os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096, f_favail=9, f_files=10)
    )
    config = load_run("train_small", [f"train.run_dir={tmp_path}"])
    checks.check(config, local_world_size(config), saves=False)
    with pytest.raises(ConfigError, match="the first"):
        checks.check(config, local_world_size(config))


@pytest.mark.parametrize(
    ("free_bytes", "free_files", "fits"), [(10**9, 10**6, True), (10**6, 10**6, False), (10**9, 7, False)]
)
def test_a_run_whose_first_two_checkpoints_cannot_fit_is_refused(tmp_path, monkeypatch, free_bytes, free_files, fits):
    free = SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096, f_favail=free_files, f_files=10**6)
    monkeypatch.setattr(disk.os, "statvfs", lambda path: free)
    config = load_run(
        "quickstart", ["precision.dtype=bf16", f"train.run_dir={tmp_path}", "train.save_interval=10", "train.steps=100"]
    )
    problems = disk.space_problems(config, disk.free_space(tmp_path), 4)
    if fits:
        assert problems == []
        return
    (problem,) = problems
    parameters = total_parameters(config.model)
    needed = format_bytes(disk.LOG_BYTES + 2 * 12 * parameters)
    assert f"logs and the first 2 checkpoints need {needed} and 18 files" in problem.what
    assert f"{free_files} files free" in problem.what and "choose another train.run_dir" in problem.fix
