"""`frontier-llm train` as a user meets it: refused before ranks start, resumed on another layout, ended together."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

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


def losses(run_dir: Path) -> dict[int, float]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["optimizer.learning_rate=1"], ["optimizer.learning_rate", "unknown key", "lr"]),
        (["model.heads=3", "parallel.tensor=4"], ["model.heads", "does not divide hidden 64", "kv_heads", "not divisible by tensor 4"]),
        (["parallel.pipeline=5"], ["5 stages", "4 layers"]),
        (["parallel.data=3", "batch.global_batch=8"], ["batch.global_batch", "6 or 12"]),
        (["data.train=[{path: /nowhere/text}]"], ["/nowhere/text"]),
        (["train.run_dir=/proc/run"], ["train.run_dir", "cannot be written"]),
        (["train.steps"], ["train.steps", "key=value"]),
    ],
)
def test_bad_input_is_refused_before_ranks_start(run_file, tmp_path, arguments, expected):
    begin = time.perf_counter()
    done = train(run_file, f"train.run_dir={tmp_path / 'run'}", *arguments)
    assert done.returncode == 2 and time.perf_counter() - begin < 30
    assert "Traceback" not in done.stderr
    for words in expected:
        assert words in done.stderr
    assert not (tmp_path / "run" / "logs").exists(), "no rank was started"


def test_every_problem_is_reported_at_once(run_file, tmp_path):
    done = train(run_file, f"train.run_dir={tmp_path / 'run'}", "model.kv_heads=3", "parallel.chunks=2", "batch.global_batch=7")
    for words in ("model.kv_heads", "parallel.chunks", "batch.global_batch"):
        assert words in done.stderr


def test_a_run_goes_on_where_it_stopped_on_another_layout(run_file, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(run_file, f"train.run_dir={whole}").returncode == 0
    two_stages = ["parallel.pipeline=2", "parallel.schedule=zb-h1"]
    assert train(run_file, f"train.run_dir={parts}", "train.steps=2", *two_stages).returncode == 0
    done = train(run_file, f"train.run_dir={parts}", "parallel.tensor=2", "parallel.sequence_parallel=true")
    assert done.returncode == 0 and "resuming after step 2" in done.stderr
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    again = train(run_file, f"train.run_dir={whole}")
    assert again.returncode == 0 and "resuming after step 4" in again.stderr


def test_one_dead_rank_ends_all_and_is_named_last(run_file, tmp_path):
    run_dir = tmp_path / "run"
    overrides = [f"train.run_dir={run_dir}", "train.steps=100000", "parallel.pipeline=2", "train.log_interval=100"]
    command = [sys.executable, "-m", "frontier_llm.cli.main", "train", str(run_file), *overrides]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 90
        while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").stat().st_size:
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.2)
        children = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
        assert len(children) == 2
        os.kill(children[1], signal.SIGKILL)
        begin = time.monotonic()
        _, errors = parent.communicate(timeout=60)
        assert time.monotonic() - begin < 20
    finally:
        parent.kill()
    assert parent.returncode == 128 + signal.SIGKILL
    assert "rank 1" in errors.strip().splitlines()[-1] and "SIGKILL" in errors.strip().splitlines()[-1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
