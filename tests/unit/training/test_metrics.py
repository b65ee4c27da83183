"""metrics.jsonl and the TensorBoard events of a run that was interrupted or rewound: a reader of either gets one value
per step.
"""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from frontier_llm.comm import Ledger
from frontier_llm.config import load_run
from frontier_llm.data.position import START
from frontier_llm.run import run_dir
from frontier_llm.run.signals import SignalWatcher
from frontier_llm.run.stage_memory import read_stage_memory
from frontier_llm.training import loop, observers
from frontier_llm.training.clock import PhaseClock
from frontier_llm.training.metrics import Metrics, memory_gib
from frontier_llm.training.routing import CollapsedRouter
from frontier_llm.training.step import StepResult, train_step
from frontier_llm.units import GIB


def metrics(directory: Path, incarnation: int, done_steps: int, *layout: str) -> Metrics:
    config = load_run("quickstart", ["train.steps=100", "train.log_interval=1", f"train.run_dir={directory}", *layout])
    return Metrics(config, 4, PhaseClock(Ledger()), incarnation, done_steps, observers.make(config, 0))


def steps(writer: Metrics, start: int, stop: int, loss: float) -> None:
    for step in range(start, stop):
        writer.step(step, StepResult(loss, 1.0, 1e-3, 1.0, skipped=False), 0, START)


def course(directory: Path) -> list[tuple[int, float, int]]:
    return [(row["step"], row["loss"], row["incarnation"]) for row in run_dir.steps(directory)]


def test_steps_that_a_resume_takes_back_are_not_read(tmp_path: Path) -> None:
    first = metrics(tmp_path, 1, 0)
    steps(first, 0, 5, loss=3.0)
    first.event("evaluation", 5, {"loss": 2.9})
    second = metrics(tmp_path, 2, 2)  # the first one was killed and never closed
    steps(second, 2, 4, loss=1.0)
    second.close()
    assert course(tmp_path) == [(1, 3.0, 1), (2, 3.0, 1), (3, 1.0, 2), (4, 1.0, 2)]
    assert run_dir.evaluations(tmp_path) == []
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5 + 1 + 2 + 2  # no line was rewritten
    first.close()


def test_a_rewind_takes_back_too_and_tensorboard_agrees(tmp_path: Path) -> None:
    first = metrics(tmp_path, 1, 0)
    steps(first, 0, 6, loss=3.0)
    first.go_back(3)
    steps(first, 3, 5, loss=2.0)
    first.close()
    second = metrics(tmp_path, 2, 4)
    steps(second, 4, 7, loss=1.0)
    second.close()
    for writer in (first, second):
        writer._observers[0].close()
    expected = [(1, 3.0), (2, 3.0), (3, 3.0), (4, 2.0), (5, 1.0), (6, 1.0), (7, 1.0)]
    assert [row[:2] for row in course(tmp_path)] == expected
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("step/loss")] == expected


ONE_STAGE = ("parallel.pipeline=1", "parallel.schedule=gpipe", "batch.micro_batch=2")


def test_each_attempt_says_on_which_layout_it_runs(tmp_path: Path) -> None:
    metrics(tmp_path, 1, 0).close()
    metrics(tmp_path, 2, 2).close()  # resumed without a change
    metrics(tmp_path, 3, 4, "parallel.axis_order=tp-pp-dp").close()  # took no step
    last = metrics(tmp_path, 4, 4, *ONE_STAGE)
    steps(last, 4, 8, loss=1.0)
    first, second = run_dir.layouts(tmp_path)
    assert (first["step"], second["step"], second["incarnation"]) == (0, 4, 4)
    degrees = ("tensor", "pipeline", "data", "schedule", "micro_batch")
    assert [first["layout"][name] for name in degrees] == [2, 2, 1, "1f1b", 4]
    assert [second["layout"][name] for name in degrees] == [2, 1, 2, "gpipe", 2]
    last.go_back(2)  # Rewind to before the change: the following steps run on the new layout.
    last.close()
    assert [(row["step"], row["layout"]) for row in run_dir.layouts(tmp_path)] == [
        (0, first["layout"]),
        (2, second["layout"]),
    ]
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert not [tag for tag in events.Tags()["scalars"] if "layout" in tag]


def test_a_run_may_go_back_behind_the_step_that_it_was_resumed_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = metrics(tmp_path, 1, 4)
    steps(writer, 4, 6, loss=2.0)
    writer.go_back(2)
    steps(writer, 2, 6, loss=1.0)
    writer.close()
    assert course(tmp_path) == [(3, 1.0, 1), (4, 1.0, 1), (5, 1.0, 1), (6, 1.0, 1)]
    assert "ETA -" not in capsys.readouterr().err


SMALL = (
    "model=gpt-tiny",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "batch.global_batch=2",
    "optimizer.warmup_steps=0",
)


def test_an_event_of_a_step_does_not_shorten_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step_s = 0.1
    config = load_run("train_small", [f"train.run_dir={tmp_path}", "train.steps=3", "train.log_interval=1", *SMALL])

    def slow_step(*arguments: Any) -> StepResult:
        time.sleep(step_s)
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", slow_step)
    monkeypatch.setattr(loop.RouterWatch, "step", lambda *_: [CollapsedRouter(layer=1, token_share=0.9)])
    with SignalWatcher() as signals:
        assert loop.train(config, None, signals, predict=lambda phase, ranks: (1e9 * ranks,)) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["kind"] == "collapsed router" for row in rows) == 3
    (measured,) = read_stage_memory(tmp_path)  # on a CPU, the used memory is the peak of the process
    assert measured.predicted_bytes == 10**9 and measured.allocated_bytes is None
    assert measured.used_bytes == pytest.approx(memory_gib() * GIB, rel=0.1)
    assert all(row["step_time_s"] >= step_s for row in rows if row["kind"] == "step")


def test_a_torn_line_is_cut_off_before_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1, "loss": 3.0}\n{"kind": "step", "st')
    with run_dir.open_lines(path) as lines:
        lines.write(b'{"kind": "step", "step": 2, "loss": 2.0}\n')
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    path.write_text("torn from the start")
    run_dir.open_lines(path).close()
    assert path.read_bytes() == b""


def test_a_skipped_step_says_why_and_the_last_one_has_no_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = metrics(tmp_path, 1, 97)
    writer.step(97, StepResult(3.0, 9.0, 1e-3, 1.0, skipped=True, spike=True), 1, START)
    writer.step(98, StepResult(float("nan"), 9.0, 1e-3, 1.0, skipped=True), 2, START)
    writer.step(99, StepResult(3.0, 1.0, 1e-3, 1.0, skipped=False), 2, START)
    writer.close()
    spike, overflow, last = (line for line in capsys.readouterr().err.splitlines() if "step " in line)
    assert spike.endswith("SKIPPED: a spike") and "ETA" in spike
    assert overflow.endswith("SKIPPED: loss or gradient not finite")
    assert "ETA" not in last and "SKIPPED" not in last


def test_a_full_disk_costs_lines_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = metrics(tmp_path, 1, 0)
    steps(writer, 0, 1, loss=3.0)
    disk, full = writer._lines, open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    writer._lines = full
    steps(writer, 1, 2, loss=2.0)
    assert "a line of metrics.jsonl is lost: No space left on device" in capsys.readouterr().err
    writer._lines = disk
    steps(writer, 2, 3, loss=1.0)
    writer.close()
    full.close()
    assert course(tmp_path) == [(1, 3.0, 1), (3, 1.0, 1)]


def test_tensorboard_on_a_full_disk_ends_its_events_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        def add_scalar(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        close = add_scalar

    writer = metrics(tmp_path, 1, 0)
    (events,) = writer._observers
    events._writer = Full()
    steps(writer, 0, 2, loss=3.0)
    assert (
        capsys.readouterr().err.count(
            "the record in TensorBoard ends at step 1: No space left on device; metrics.jsonl is still written"
        )
        == 1
    )
    events._writer = Full()
    writer.close()
    events.close()
    assert course(tmp_path) == [(1, 3.0, 1), (2, 3.0, 1)]
