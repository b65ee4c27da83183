"""A calibration with a budget measures in rounds, as many as fit, and takes the median of each time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frontier_llm.comm import serial_mesh
from frontier_llm.config import load_run
from frontier_llm.experiments.measure import samples
from frontier_llm.experiments.measure.calibration import Samples, median_samples

ROUND = Samples(
    ranks=2,
    device="cpu",
    dtype="bf16",
    memory_bytes=4e9,
    gemm=[(256, 192, 384, 1.0)],
    attention=[(4, 6, 256, 64, 1.0, 2.0)],
    elementwise_s=1.0,
    collectives=[("all_reduce", 2, 1024, 1.0), ("all_gather", 2, 1024, 5.0)],
)


def test_each_time_is_the_median_over_the_rounds() -> None:
    slower = replace(ROUND, gemm=[(256, 192, 384, 3.0)], elementwise_s=9.0, attention=[(4, 6, 256, 64, 8.0, 2.5)])
    other = replace(
        ROUND, gemm=[(256, 192, 384, 2.0)], collectives=[("all_reduce", 2, 1024, 4.0), ROUND.collectives[1]]
    )
    median = median_samples([ROUND, slower, other])
    assert median.gemm == [(256, 192, 384, 2.0)]
    assert median.attention == [(4, 6, 256, 64, 1.0, 2.0)]
    assert median.elementwise_s == 1.0
    assert median.collectives == [("all_reduce", 2, 1024, 1.0), ("all_gather", 2, 1024, 5.0)]
    assert (median.ranks, median.dtype) == (2, "bf16")
    assert median_samples([ROUND]) == ROUND


@pytest.mark.parametrize(
    ("budget_s", "round_s", "repeats", "rounds", "readings"),
    [
        (None, 4.0, 5, 1, 5),  # one round with all repetitions, however long it takes
        (10.0, 4.0, 5, 2, 1),  # a third round would end after 12 s
        (12.0, 4.0, 5, 3, 1),
        (100.0, 4.0, 5, 5, 1),  # never more rounds than repetitions
        (1.0, 4.0, 5, 1, 1),  # the first round always runs
    ],
)
def test_rounds_end_with_the_budget(
    monkeypatch: pytest.MonkeyPatch, budget_s: float | None, round_s: float, repeats: int, rounds: int, readings: int
) -> None:
    now_s = 0.0
    asked: list[int] = []

    class Bench:
        stretch = 1.0

        def __init__(self, *arguments: Any) -> None:
            asked.append(arguments[-1])

        def contention(self) -> tuple[list[tuple[int, float]], float]:
            return [(1, 1.0)], 1.0

        def agreed_max(self, value: float) -> float:
            return value

    def measure_once(_: Bench, start: Samples) -> Samples:
        nonlocal now_s
        now_s += round_s
        asked.append(0)
        return start

    monkeypatch.setattr(samples, "_Bench", Bench)
    monkeypatch.setattr(samples, "_measure_once", measure_once)
    monkeypatch.setattr(samples, "time", SimpleNamespace(perf_counter=lambda: now_s))
    config = load_run("bench", [])
    samples.measure(config, serial_mesh(), torch.device("cpu"), 1e9, repeats=repeats, budget_s=budget_s)
    assert asked == [readings] + [0] * rounds
