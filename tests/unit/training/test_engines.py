"""The other engines from the command line: nothing is compiled, and a missing engine is refused with a clear
message.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from frontier_llm.cli.checks import check
from frontier_llm.config import load_run
from frontier_llm.errors import BackendError, ConfigError

TINY = {
    "model": {"base": "llama-tiny"},
    "batch": {"global_batch": 8, "micro_batch": 2},
    "optimizer": {"lr": 1e-3, "schedule": "constant"},
    "parallel": {"data": 2},
    "train": {"steps": 3, "device": "cpu", "tensorboard": False},
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


def losses(run_file: Path, name: str, *overrides: str) -> list[float]:
    """Return the losses of three steps on two local ranks, with the guard on and without compiler and ninja."""
    run_dir = run_file.parent / name
    command = [
        sys.executable,
        "-m",
        "frontier_llm.cli.main",
        "train",
        str(run_file),
        "--no-jit",
        f"train.run_dir={run_dir}",
        *overrides,
    ]
    environment = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")} | {
        "PATH": str(run_file.parent)
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == ""  # engines print to stderr
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]


@pytest.mark.thorough
def test_no_engine_compiles_anything(run_file: Path) -> None:
    pytest.importorskip("deepspeed", reason="pip install --no-build-isolation deepspeed==0.19.8")
    native = losses(run_file, "native")
    exact = losses(run_file, "native-fp32", "precision.dtype=fp32")
    # fp32 is used because bf16 weights may round differently if a sum has another order. The loss then differs by
    # 1.4e-6 after two updates.
    one = "comm.in_flight=one"
    assert losses(run_file, "deepspeed", "optimizer.engine=deepspeed", "precision.dtype=fp32", one) == pytest.approx(
        exact, rel=1e-6
    )
    assert losses(run_file, "fsdp", "parallel.data_mode=fsdp", one) == pytest.approx(native, rel=2e-3)


def test_a_missing_deepspeed_is_said_before_ranks_start(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_run(str(run_file), ["optimizer.engine=deepspeed", f"train.run_dir={tmp_path}"])
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else found(name, *rest)
    )
    with pytest.raises(
        ConfigError, match=r"deepspeed is not installed\s+fix: pip install --no-build-isolation deepspeed==0\.19\.8"
    ):
        check(config, 2)


def test_a_deepspeed_that_cannot_be_imported_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from frontier_llm.optim import deepspeed_engine

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(BackendError, match="pip install --no-build-isolation deepspeed"):
        deepspeed_engine._import(torch.device("cpu"))


def test_engines_that_are_not_chosen_are_not_imported(run_file: Path) -> None:
    code = (
        "import sys, frontier_llm.training.build; sys.exit(any(name in sys.modules for name in ('deepspeed', "
        "'torch.distributed.fsdp')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
