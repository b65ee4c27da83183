"""A start that hangs because another rank is stopped exits by itself and prints stacks."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.checkpoint.upload import Uploads
from frontier_llm.config import load_run
from frontier_llm.run.signals import SignalWatcher
from frontier_llm.run.uploads import read_uploads
from frontier_llm.training import loop
from frontier_llm.training.guard import Watchdog

# A rank whose start never ends, in a process of its own: a fork would inherit the locks of other tests' timers.
STUCK = """
import contextlib, sys, time
from frontier_llm.config import load_run
from frontier_llm.run.signals import SignalWatcher
from frontier_llm.training import loop

@contextlib.contextmanager
def stuck(*_):
    time.sleep(3600)  # pytest ends the test earlier
    yield

loop.joined_state = stuck
loop.train(load_run("quickstart", [f"train.run_dir={sys.argv[1]}", "train.timeout_s=1"]), None, SignalWatcher())
"""


def test_a_rank_that_waits_for_ever_at_the_start_ends(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", STUCK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Timeout (0:00:03)" in done.stderr


def test_a_finished_run_that_waits_for_its_uploads_is_not_stuck_and_obeys_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the watchdog ended a run on one rank whose uploads took longer than 540 s."""
    pytest.importorskip("fsspec")
    reports: list[str] = []
    moved = Watchdog.moved

    def count(watchdog: Watchdog) -> None:
        moved(watchdog)
        reports.append(watchdog._section)
        if reports.count("save") == 5:
            (tmp_path / "run" / "STOP").touch()

    def never_ends(uploads: Uploads, request: dict[str, Any], longest_s: float = 0.0) -> dict[str, str]:
        uploads._stopped.wait(60 if request["task"] == "push" else 0)
        return {"kind": "unreachable", "text": "no answer"}

    monkeypatch.setattr(Watchdog, "moved", count)
    monkeypatch.setattr(Uploads, "_run", never_ends)
    words = [
        "model=llama-tiny",
        "data.train=synthetic",
        "train.steps=1",
        "train.save_final=true",
        "train.remote_wait_s=20",
    ]
    words += [f"train.run_dir={tmp_path}/run", f"train.remote={(tmp_path / 'store').as_uri()}"]
    with SignalWatcher() as signals:
        assert loop.train(load_run("bench", words), None, signals) == 0
    assert 5 <= reports.count("save") < 50
    record = read_uploads(tmp_path / "run")
    assert record is not None and record.pending == (1,)


def test_a_rank_never_imports_sympy(tmp_path: Path) -> None:
    """Its import takes half a second, in which the other ranks would wait in a collective."""
    program = (
        "import sys; from frontier_llm.config import load_run; from frontier_llm.training import loop\n"
        "from frontier_llm.run.signals import SignalWatcher\n"
        "config = load_run('bench', ['model=llama-tiny', 'train.steps=1', 'train.run_dir=' + sys.argv[1]])\n"
        "with SignalWatcher() as signals: assert loop.train(config, None, signals) == 0\n"
        "assert 'torch' in sys.modules and 'sympy' not in sys.modules"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_resumed_run_draws_no_weights_and_goes_on_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(run_dir: Path, steps: int) -> list[float]:
        """Return the losses of the steps of this call, on one rank."""
        words = [
            "model=llama-tiny",
            "batch.global_batch=2",
            "batch.micro_batch=1",
            "train.save_final=true",
            "optimizer.schedule=constant",
        ]
        config = load_run("bench", [*words, f"train.run_dir={run_dir}", f"train.steps={steps}"])
        with SignalWatcher() as signals:
            assert loop.train(config, None, signals) == 0
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line and "mfu" in line]

    whole = trained(tmp_path / "whole", 4)
    assert len(whole) == 4
    trained(tmp_path / "parts", 2)
    monkeypatch.setattr(
        importlib.import_module("frontier_llm.model.initialize"), "normals", lambda *_: pytest.fail("weights are drawn")
    )
    assert trained(tmp_path / "parts", 4) == whole
    with pytest.raises(pytest.fail.Exception, match="weights are drawn"):
        trained(tmp_path / "new", 1)
