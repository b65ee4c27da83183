"""Overlap changes nothing but time: the bits are equal with and without it. The timeline shows the hidden and the
exposed parts.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from frontier_llm.comm import all_reduce_, barrier, build_mesh, start_all_reduce_
from frontier_llm.config import load_run
from frontier_llm.data.loader import SampleBatch
from frontier_llm.topology.grid import Grid
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import build_state
from frontier_llm.training.step import train_step
from tests.harness.pool import RankPool
from tests.harness.timeline import Interval, MeasuredTimeline, draw, write_chrome_trace


def _record(rank: int) -> MeasuredTimeline:
    """Record two all-reduces. The first is waited for at once. The second is in flight during a sleep of 1 s, which
    stands for compute.
    """
    mesh = build_mesh(Grid(1, 1, 2), rank, timeout_s=30.0)
    barrier(mesh.world)
    timeline = MeasuredTimeline(rank)
    timeline.attach(mesh.ledger)
    timeline.at("exposed")
    all_reduce_(torch.ones(1000), mesh.dp)
    timeline.at("hidden")
    pending = start_all_reduce_(torch.ones(1000), mesh.world)
    time.sleep(1.0)
    pending.wait()
    timeline.at("")
    return timeline


def test_exposed_and_hidden(ranks: RankPool, tmp_path: Path) -> None:
    """The bounds also hold on a busy machine. A sleep is at least as long as requested, and all time in a wait counts
    as blocked.
    """
    timelines = ranks.run(2, _record)
    for timeline in timelines:
        spent = timeline.exposed_and_hidden_s()
        assert spent["world all_reduce"][1] >= 0.06
        for name, (exposed_s, _) in spent.items():
            blocked = [
                interval for interval in timeline.intervals if interval.row == "blocked" and interval.name == name
            ]
            assert len(blocked) == 2, "in its start and in its end"
            assert exposed_s == pytest.approx(sum(interval.end - interval.begin for interval in blocked))
    assert [interval.name for interval in timelines[0].intervals if interval.row == "compute"] == ["exposed", "hidden"]
    write_chrome_trace(tmp_path / "trace.json", timelines)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1} and all(
        event["dur"] >= 0 for event in events if event["ph"] == "X"
    )
    draw(tmp_path / "trace.png", timelines)
    assert (tmp_path / "trace.png").stat().st_size > 1000


def test_calls_that_overlap_count_once() -> None:
    timeline = MeasuredTimeline(0)
    spans = (
        ("in flight", 0.0, 2.0),
        ("in flight", 1.0, 3.0),
        ("in flight", 1.2, 1.4),
        ("in flight", 5.0, 6.0),
        ("blocked", 2.5, 3.0),
    )
    timeline.intervals = [Interval(row, "dp all_gather", begin, end) for row, begin, end in spans]
    assert timeline.exposed_and_hidden_s() == {"dp all_gather": (0.5, 3.5)}


class _Source:
    """Random tokens, the same in every run of this test."""

    reset_at_documents = masks_targets = False

    def __init__(self, rank: int, vocabulary: int, length: int) -> None:
        self._rank = rank
        self._vocabulary = vocabulary
        self._length = length

    def microbatch(self, step: int, index: int) -> SampleBatch:
        generator = np.random.default_rng([step, index, self._rank])
        return SampleBatch(generator.integers(0, self._vocabulary, (1, self._length + 1)), None, None)


def _losses(rank: int, overlap: bool) -> list[tuple[float, float]]:
    content = [
        "parallel.data=2",
        "batch.global_batch=4",
        "batch.micro_batch=1",
        "model.layers=2",
        "model.sequence_length=32",
    ]
    config = load_run("bench", [*content, "train.device=cpu", f"comm.overlap_gradients={str(overlap).lower()}"])
    plan = make_plan(config, 2)
    mesh = build_mesh(plan.grid, rank, timeout_s=60.0)
    state = build_state(
        config, plan, mesh, torch.device("cpu"), _Source(rank, config.model.vocab_size, config.model.sequence_length)
    )  # type: ignore[arg-type]
    return [(result.loss, result.gradient_norm) for result in (train_step(state) for _ in range(3))]


@pytest.mark.parametrize("world", [2])
def test_gradient_overlap_changes_no_bit(ranks: RankPool, world: int) -> None:
    assert ranks.run(world, _losses, True) == ranks.run(world, _losses, False)
