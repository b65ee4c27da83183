"""A start that hangs because another rank is stopped exits by itself and prints stacks."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontier_llm.config import load_run
from frontier_llm.run.signals import SignalWatcher
from frontier_llm.training import loop


def test_a_rank_that_waits_for_ever_at_the_start_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def stuck(*_: object) -> Iterator[None]:
        time.sleep(60)
        yield

    monkeypatch.setattr(loop, "joined_state", stuck)
    config = load_run("quickstart", [f"train.run_dir={tmp_path}", "train.timeout_s=1"])
    started_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        loop.train(config, None, SignalWatcher())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert time.monotonic() - started_s < 30


def test_the_first_backward_imports_nothing_large() -> None:
    """Importing sympy takes seconds, in which the other ranks would wait in a collective."""
    program = (
        "import sys; import frontier_llm.training.loop; before = set(sys.modules)\n"
        "import torch; weight = torch.ones(2, requires_grad=True)\n"
        "torch.autograd.backward((2 * weight,), (torch.ones(2),))\n"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - {'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


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
