"""What the loop may rely on: one failed save is borne, the second is raised, and no step is saved twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frontier_llm.checkpoint import Progress, Superseded
from frontier_llm.errors import CheckpointError
from frontier_llm.training.guard import Saves


class FakeManager:
    directory = Path("checkpoints")

    def __init__(self) -> None:
        self.started: list[int] = []
        self.error: CheckpointError | None = None
        self.pending = False

    def start_save(self, progress: Progress) -> None:
        if self.error is not None:
            raise self.error
        self.started.append(progress.step)
        self.pending = True

    def poll(self) -> Path | None:
        return None

    def wait(self, audit: bool) -> Path | None:
        done = self.pending
        self.pending = False
        return self.directory / str(self.started[-1]) if done else None


def at(step: int) -> Progress:
    zero: dict[str, Any] = dict.fromkeys(
        ("consumed_samples", "tokens", "optimizer_updates", "scaler_clean_steps", "skipped_steps"), 0
    )
    return Progress(step=step, loss_scale=1.0, **zero)


def made(lag_steps: int = 100) -> tuple[Saves, FakeManager, list[tuple[int, Path]], list[int]]:
    manager = FakeManager()
    saved = list[tuple[int, Path]]()
    checked = list[int]()
    return (
        Saves(manager, lag_steps, checked.append, lambda step, path: saved.append((step, path))),
        manager,
        saved,
        checked,
    )  # type: ignore[arg-type]


def test_the_second_failure_in_a_row_is_raised() -> None:
    saves, manager, _, _ = made()
    manager.error = CheckpointError("disk full")
    saves.begin(at(5))
    manager.error = None
    saves.begin(at(10))
    saves.finish(at(10))
    manager.error = CheckpointError("disk full")
    saves.begin(at(15))
    with pytest.raises(CheckpointError, match="disk full"):
        saves.begin(at(20))


def test_the_last_save_and_a_lost_run_directory_are_never_borne() -> None:
    saves, manager, _, _ = made()
    manager.error = CheckpointError("disk full")
    with pytest.raises(CheckpointError):
        saves.finish(at(5))
    saves, manager, _, _ = made()
    manager.error = Superseded("replaced")
    with pytest.raises(Superseded):
        saves.begin(at(5))


def test_one_step_is_saved_and_compared_once() -> None:
    saves, manager, saved, checked = made()
    saves.begin(at(5))
    saves.begin(at(5))
    saves.finish(at(5))
    assert manager.started == checked == [5] and saved == [(5, Path("checkpoints/5"))]


@pytest.mark.parametrize(("lag_steps", "on_disk_after"), [(0, 5), (1, 6), (3, 8)])
def test_training_waits_for_a_save_that_is_late(lag_steps: int, on_disk_after: int) -> None:
    saves, _, saved, _ = made(lag_steps)
    saves.begin(at(5))
    step = 5
    while not saved and step < 50:
        step += 1
        saves.follow(step)
    assert step == on_disk_after
