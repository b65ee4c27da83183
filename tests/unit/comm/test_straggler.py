"""Stragglers are named in time and never wrongly: on simulated step times with noise, and on real ranks with one that sleeps."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from frontier_llm.comm import all_reduce_, build_mesh
from frontier_llm.comm.straggler import Straggler, StragglerDetector, StragglerWatch
from frontier_llm.topology import Grid
from tests.harness.pool import RankPool


def _noisy(generator: np.random.Generator, ranks: int, usual_s: float) -> np.ndarray:
    """Simulated busy times: 2 % spread, a machine-wide wobble, and now and then a hiccup of up to 80 % on one rank."""
    busy = usual_s * (1 + 0.02 * generator.standard_normal(ranks)) * (1 + 0.05 * abs(generator.standard_normal()))
    hiccups = generator.random(ranks) < 0.02
    return np.where(hiccups, busy * (1 + 0.8 * generator.random(ranks)), busy)


@pytest.mark.parametrize(("ranks", "stages"), [(64, 4), (8, 8), (2, 1), (16, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_no_false_alarm_in_500_simulated_steps(ranks: int, stages: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    detector = StragglerDetector([rank * stages // ranks for rank in range(ranks)])
    scale = np.array([1 + 0.3 * (rank * stages // ranks) for rank in range(ranks)])  # stages differ by design
    assert [named for _ in range(500) for named in detector.step(list(_noisy(generator, ranks, 1.0) * scale))] == []


@pytest.mark.parametrize(("ranks", "stages"), [(64, 4), (8, 8), (2, 1), (16, 1)])
@pytest.mark.parametrize("delay_s", [0.2, 1.0])
def test_a_simulated_straggler_is_named_within_20_steps_and_once(ranks: int, stages: int, delay_s: float) -> None:
    generator = np.random.default_rng(7)
    detector = StragglerDetector([rank * stages // ranks for rank in range(ranks)])
    slow, begin = ranks // 2, 100
    found: list[tuple[int, Straggler]] = []
    for step in range(200):
        busy = _noisy(generator, ranks, 1.0)
        busy[slow] += delay_s if step >= begin else 0.0
        found += [(step, straggler) for straggler in detector.step(list(busy))]
    assert [straggler.global_rank for _, straggler in found] == [slow]
    assert begin <= found[0][0] < begin + 20
    assert found[0][1].excess_s == pytest.approx(delay_s, abs=0.15)


def test_a_rank_that_recovers_can_be_named_again() -> None:
    detector = StragglerDetector([0] * 4)
    phases = [0.0] * 30 + [0.5] * 30 + [0.0] * 30 + [0.5] * 30
    named = [step for step, extra in enumerate(phases) for _ in detector.step([1.0, 1.0 + extra, 1.001, 0.999])]
    assert len(named) == 2 and 30 <= named[0] < 50 and 90 <= named[1] < 110


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (8, 8)])
def test_a_machine_that_slows_down_is_no_straggler(ranks: int, stages: int) -> None:
    generator = np.random.default_rng(3)
    detector = StragglerDetector([rank * stages // ranks for rank in range(ranks)])
    steps = [_noisy(generator, ranks, 1.0) * (1.7 if 100 <= step < 150 else 1.0) for step in range(200)]
    assert [named for busy in steps for named in detector.step(list(busy))] == []


def _train_with_a_sleeper(rank: int, steps: int, begin: int) -> list[tuple[int, int, str]]:
    """Real ranks whose compute is a sleep of 20 ms; from `begin` on rank 2 sleeps 200 ms more, and everyone waits for it."""
    grid = Grid(1, 1, 4)
    mesh = build_mesh(grid, rank, timeout_s=30.0)
    watch, named = StragglerWatch(mesh, grid, torch.device("cpu"), f"n{rank}"), []
    for step in range(steps):
        with watch.step() as found:
            time.sleep(0.02 + (0.2 if rank == 2 and step >= begin else 0.0))
            all_reduce_(torch.ones(1000), mesh.dp)
        named += [(step, straggler.global_rank, straggler.host) for straggler in found]
    return named


def test_a_rank_that_sleeps_200_ms_is_named_by_every_rank(ranks: RankPool) -> None:
    replies = ranks.run(4, _train_with_a_sleeper, 35, 10)
    assert all(reply == replies[0] for reply in replies)
    assert [named for _, *named in replies[0]] == [[2, "n2"]] and 10 <= replies[0][0][0] < 30
