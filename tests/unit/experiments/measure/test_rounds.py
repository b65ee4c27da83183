"""A calibration with a budget measures in as many rounds as fit into the budget. For each time it takes the median over
the rounds.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frontier_llm.comm import serial_mesh
from frontier_llm.config import load_run
from frontier_llm.experiments.measure import rounds as module
from frontier_llm.experiments.measure.calibration import Samples
from frontier_llm.experiments.measure.rounds import measure_within, median_samples

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
    ("budget_s", "most_rounds", "rounds"),
    [
        (10.0, 5, 2),  # a third round would end after 12 s
        (12.0, 5, 3),
        (100.0, 5, 5),  # never more rounds than repetitions
        (1.0, 5, 1),  # the first round always runs
    ],
)
def test_rounds_end_with_the_budget(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, most_rounds: int, rounds: int
) -> None:
    now_s = 0.0
    readings: list[int] = []

    def measure(*_: Any, repeats: int) -> Samples:
        nonlocal now_s
        now_s += 4.0
        readings.append(repeats)
        return ROUND

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s))
    samples = measure_within(
        budget_s,
        most_rounds,
        config=load_run("bench", []),
        mesh=serial_mesh(),
        device=torch.device("cpu"),
        memory_bytes=4e9,
    )
    assert samples == ROUND and readings == [1] * rounds
