"""Stragglers are named in time and never wrongly: on simulated step times with noise, and on real ranks of which one
sleeps.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from frontier_llm.comm import all_reduce_, build_mesh
from frontier_llm.comm import ledger as ledgers
from frontier_llm.comm.straggler import SAMPLES, BusyTime, Straggler, StragglerDetector, StragglerWatch
from frontier_llm.topology.grid import Grid
from tests.harness.pool import RankPool


def _noisy(generator: np.random.Generator, ranks: int, usual_s: float) -> np.ndarray:
    """Return simulated busy times: 2 % spread, a machine-wide variation, and sometimes a delay of up to 80 % on one
    rank.
    """
    busy = usual_s * (1 + 0.02 * generator.standard_normal(ranks)) * (1 + 0.05 * abs(generator.standard_normal()))
    hiccups = generator.random(ranks) < 0.02
    return np.where(hiccups, busy * (1 + 0.8 * generator.random(ranks)), busy)


def _samples(generator: np.random.Generator, ranks: int, scale: np.ndarray | float = 1.0) -> np.ndarray:
    """Return the values that the ranks report after an interval: medians over its samples."""
    return np.median([_noisy(generator, ranks, 1.0) * scale for _ in range(SAMPLES)], axis=0)


@pytest.mark.parametrize(("ranks", "stages"), [(64, 4), (8, 8), (2, 1), (16, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_no_false_alarm_in_500_simulated_intervals(ranks: int, stages: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    detector = StragglerDetector([rank * stages // ranks for rank in range(ranks)])
    scale = np.array([1 + 0.3 * (rank * stages // ranks) for rank in range(ranks)])  # stages differ by design
    assert [named for _ in range(500) for named in detector.compare(list(_samples(generator, ranks, scale)))] == []


@pytest.mark.parametrize(("ranks", "stages"), [(64, 4), (8, 8), (2, 1), (16, 1)])
@pytest.mark.parametrize("delay_s", [0.2, 1.0])
def test_a_simulated_straggler_is_named_in_its_second_interval_and_once(
    ranks: int, stages: int, delay_s: float
) -> None:
    generator = np.random.default_rng(7)
    detector = StragglerDetector([rank * stages // ranks for rank in range(ranks)])
    slow = ranks // 2
    begin = 5
    named: list[tuple[int, Straggler]] = []
    for interval in range(20):
        busy = _samples(generator, ranks)
        busy[slow] += delay_s if interval >= begin else 0.0
        named += [(interval, straggler) for straggler in detector.compare(list(busy))]
    assert [(interval, straggler.global_rank) for interval, straggler in named] == [(begin + 1, slow)]
    assert named[0][1].excess_s == pytest.approx(delay_s, abs=0.15)


def test_a_rank_that_recovers_can_be_named_again() -> None:
    detector = StragglerDetector([0] * 4)
    phases = [0.0, 0.5, 0.0, 0.5, 0.5, 0.5, 0.0, 0.5, 0.5]
    named = [
        interval for interval, extra in enumerate(phases) for _ in detector.compare([1.0, 1.0 + extra, 1.001, 0.999])
    ]
    assert named == [4, 8]


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (8, 8)])
def test_a_machine_that_slows_down_is_no_straggler(ranks: int, stages: int) -> None:
    generator = np.random.default_rng(3)
    detector = StragglerDetector([rank * stages // ranks for rank in range(ranks)])
    intervals = [_samples(generator, ranks, 1.7 if 20 <= interval < 30 else 1.0) for interval in range(40)]
    assert [named for busy in intervals for named in detector.compare(list(busy))] == []


def _train_with_a_slow_rank(rank: int, steps: int, begin: int) -> tuple[list[tuple[int, int, str]], list[int]]:
    """Run ranks whose compute takes 20 ms of their own clocks. From step `begin` on, rank 2 takes 200 ms more.

    Return (step, rank, host) of each named straggler, and the steps in which the watch has communicated.
    """
    grid = Grid(1, 1, 4)
    mesh = build_mesh(grid, rank, timeout_s=30.0)
    watch = StragglerWatch(mesh, grid, torch.device("cpu"), f"n{rank}", 10)
    named = []
    talked = []
    now_s = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now_s, time=lambda: now_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("frontier_llm.comm.straggler.time", clock)
        patch.setattr("frontier_llm.comm.ledger.time", clock)
        for step in range(steps):
            before = mesh.ledger.calls["world", "all_gather"]
            with watch.step() as found:
                now_s += 0.02 + (0.2 if rank == 2 and step >= begin else 0.0)
                all_reduce_(torch.ones(1000), mesh.dp)
            named += [(step, straggler.global_rank, straggler.host) for straggler in found]
            talked += [step] if mesh.ledger.calls["world", "all_gather"] != before else []
    return named, talked


def test_a_rank_that_takes_200_ms_more_is_named_by_every_rank(ranks: RankPool) -> None:
    replies = ranks.run(4, _train_with_a_slow_rank, 30, 10)
    assert all(reply == replies[0] for reply in replies)
    named, talked = replies[0]
    assert named == [(29, 2, "n2")] and talked == [9, 19, 29]


def _intervals(rank: int, step_s: float, longest_s: float, steps: int) -> list[int]:
    """Return the steps at which the ranks compared. The clock of rank 1 runs twice as fast as that of rank 0."""
    grid = Grid(1, 1, 2)
    mesh = build_mesh(grid, rank, timeout_s=30.0)
    watch = StragglerWatch(mesh, grid, torch.device("cpu"), f"n{rank}", 25, longest_s)
    now_s = 0.0
    compared = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("frontier_llm.comm.straggler.time", SimpleNamespace(perf_counter=lambda: now_s))
        for step in range(steps):
            before = mesh.ledger.calls["world", "all_gather"]
            with watch.step():
                now_s += step_s * (1 + rank) * (10 if step == 0 else 1)  # the first step also warms up
            if mesh.ledger.calls["world", "all_gather"] != before:
                compared.append(step + 1)
    return compared


@pytest.mark.parametrize(
    ("step_s", "steps", "expected"),
    [
        # step time of a 1T model: a straggler is reported after 2 steps (20 minutes) instead of 8 hours
        (580.0, 5, [2, 3, 4, 5]),
        (60.0, 13, [2, 7, 12]),
        (0.1, 60, [2, 27, 52]),  # never more than the largest number of steps
    ],
)
def test_rank_0_turns_seconds_into_steps_for_all(
    ranks: RankPool, step_s: float, steps: int, expected: list[int]
) -> None:
    assert ranks.run(2, _intervals, step_s, 300.0, steps) == [expected] * 2


def test_milliseconds_of_noise_are_no_message() -> None:
    """12 ms more than 30 ms are 40 %, but so short a delay needs no message."""
    detector = StragglerDetector([0, 0, 0, 0])
    assert [detector.compare([0.03, 0.03, 0.042, 0.03]) for _ in range(4)] == [[]] * 4
    assert [found.global_rank for _ in range(2) for found in detector.compare([0.03, 0.03, 0.06, 0.03])] == [2]


class _Event:
    """An event of a device whose clock is `now_s`, which the test advances."""

    now_s = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_s = _Event.now_s

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


def test_on_a_gpu_the_device_tells_what_it_stood_still_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ledger = ledgers.Ledger()
    busy = BusyTime(ledger, torch.device("cuda"))
    for _ in range(3):
        with busy.measured():
            _Event.now_s += 1.0
            with ledger.blocked(ledger.add("dp", "all_reduce", 8)):
                _Event.now_s += 5.0
                # part of the outer wait, so it is not counted again
                with ledger.blocked(ledger.add("dp.rail", "send", 8)):
                    _Event.now_s += 2.0
            _Event.now_s += 1.5
    assert busy.take() == pytest.approx(2.5) and ledger.waits is None
