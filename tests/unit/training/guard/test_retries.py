"""Allocator retries above the stated rate end a start as out of memory, with a checkpoint. This needs a roomier plan,
which is a layout with less memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from frontier_llm.checkpoint.checkpoints import Checkpoints
from frontier_llm.comm import serial_mesh
from frontier_llm.config import load_run
from frontier_llm.errors import OUT_OF_MEMORY, CheckpointError
from frontier_llm.run.failure import read_failure
from frontier_llm.run.job import ROOMIER_PLAN_VARIABLE
from frontier_llm.run.run_dir import latest_step
from frontier_llm.run.signals import SignalWatcher
from frontier_llm.training import loop
from frontier_llm.training.guard.retries import WINDOW_STEPS, RetryWatch, Tight, TightMemory

CPU = torch.device("cpu")


def counter(retries_per_step: list[int]) -> Callable[[], int]:
    """Return a counter that is read once at the start and once per window of WINDOW_STEPS steps."""
    totals = iter([0, *(sum(retries_per_step[: end + 1]) for end in range(len(retries_per_step)))])
    return lambda: next(totals)


def ends(count: Callable[[], int] | None, windows: int) -> list[int]:
    """Return the steps after which the watch reports tight memory."""
    watch = RetryWatch(serial_mesh().world, CPU, count)
    return [step for step in range(1, windows * WINDOW_STEPS + 1) if watch.after_step(step) is not None]


@pytest.mark.parametrize(
    ("retries_in_window", "expected"),
    [
        ([0, 0, 0], []),
        ([3, 0, 9], []),  # the first steps, evaluations and saves
        ([0, 10, 0], [20]),
        ([9, 25, 12], [20, 30]),
    ],
)
def test_one_retry_per_step_over_a_window_is_too_much(
    monkeypatch: pytest.MonkeyPatch, retries_in_window: list[int], expected: list[int]
) -> None:
    monkeypatch.setenv(ROOMIER_PLAN_VARIABLE, "1")
    assert ends(counter(retries_in_window), 3) == expected
    assert ends(None, 3) == []  # a CPU has no allocator retries
    monkeypatch.delenv(ROOMIER_PLAN_VARIABLE)
    assert ends(counter(retries_in_window), 3) == []  # without a roomier plan, another start would not help


def train_with_tight_memory(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a small run on this process's CPU, in which a counter reports 12 retries per window."""
    monkeypatch.setenv(ROOMIER_PLAN_VARIABLE, "1")
    made = iter(range(0, 1000, 12))
    monkeypatch.setattr(loop, "device_retries", lambda device: lambda: next(made))
    small = ["model=gpt-tiny", "parallel.tensor=1", "parallel.pipeline=1", "batch.global_batch=2"]
    settings = ["train.steps=40", "train.save_interval=30", "optimizer.warmup_steps=0", f"train.run_dir={run_dir}"]
    config = load_run("train_small", [*small, *settings])
    with SignalWatcher() as signals, pytest.raises(TightMemory, match="12 times in 10 steps"):
        loop.train(config, None, signals)


def test_the_run_saves_and_ends_as_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_with_tight_memory(tmp_path, monkeypatch)
    assert latest_step(tmp_path) == WINDOW_STEPS
    failure = read_failure(tmp_path)
    assert failure is not None
    assert (failure.cause, failure.rank, failure.step) == (OUT_OF_MEMORY, 0, WINDOW_STEPS)
    assert not failure.host_suspect
    assert TightMemory.exit_code == 1  # exit code 1 means neither a refusal nor a requested stop


def test_a_failed_save_does_not_hide_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the failed save was recorded as a refusal, so the job was given up."""

    def fails(checkpoints: Checkpoints, verify: bool = True) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(Checkpoints, "finish", fails)
    train_with_tight_memory(tmp_path, monkeypatch)
    failure = read_failure(tmp_path)
    assert failure is not None and failure.cause == OUT_OF_MEMORY


def test_the_record_names_the_rank() -> None:
    failure = Tight(retries=25, rank=3, host="n1", step=20).as_failure()
    assert failure.describe() == (
        "rank 3 on n1 failed first, at step 20 (train): device memory is too tight: torch's allocator freed its cache "
        "and tried again 25 times in 10 steps, and the limit is 1 per step"
    )
