"""The simulated step: extended schedules equal the full list, and closed forms meet the simulation where they are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from frontier_llm.config.load import load_model
from frontier_llm.costs import Workload
from frontier_llm.costs.time import step_s
from frontier_llm.costs.workload import SCHEDULES, model_numbers
from frontier_llm.machine import Rates, load_machine, rates
from frontier_llm.planner import pipeline
from frontier_llm.planner.pipeline import play
from frontier_llm.topology import split_layers

FRONTIER = rates(load_machine("frontier"))


def layout(model: str = "gpt-22b", **changes: float) -> Workload:
    base = {"tp": 4, "pp": 4, "dp": 2, "chunks": 1, "B": 1, "m": 16, "sp": 0, "recompute": 0, "zero": 1, "dp_outer": 0, "schedule": 1}
    return Workload(**model_numbers(load_model(model)), **{**base, **changes})


def without_messages(numbers: Rates = FRONTIER) -> Rates:
    """The machine with messages that take no time."""
    return replace(numbers, network_latency_s=0.0, node_network_bytes_s=1e18, fabric_latency_s=0.0)


@pytest.mark.parametrize(
    ("schedule", "pp", "chunks", "m"),
    [
        ("1f1b", 4, 1, 300),
        ("1f1b", 16, 1, 200),
        ("interleaved", 4, 2, 130),
        ("interleaved", 8, 3, 96),
        ("zb-h1", 4, 1, 250),
        ("zb-h1", 16, 1, 160),
    ],
)
@pytest.mark.parametrize("machine", ["frontier", "selene"])
def test_extended_schedules_equal_the_full_list(
    schedule: str, pp: int, chunks: int, m: int, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = rates(load_machine(machine))
    w = layout(pp=pp, chunks=chunks, m=m, schedule=SCHEDULES.index(schedule))
    stages = split_layers(load_model("gpt-22b"), pp * chunks)
    short = play(w, numbers, schedule, stages)
    assert short.timeline.schedule.microbatches < m  # else nothing was tested
    monkeypatch.setattr(pipeline, "STEADY_MICROBATCHES", 10**6)
    full = play(w, numbers, schedule, stages)
    assert full.timeline.schedule.microbatches == m
    assert short.step_s == pytest.approx(full.step_s, rel=1e-9)
    assert short.end_s == pytest.approx(full.end_s, rel=1e-9)
    assert short.busy_s == pytest.approx(full.busy_s, rel=1e-9)


@pytest.mark.parametrize("m", [8, 32])
def test_equal_stages_give_the_closed_form_bubble(m: int) -> None:
    """(pp - 1) / m of idle per compute for 1F1B with equal stages and free messages (SC21, section 2.2)."""
    times = tuple(pipeline.StageTimes(1.0, 2.0, 1.0) for _ in range(4))
    timeline = pipeline._simulate("1f1b", 4, m, 1, times, 0.0)
    assert timeline.bubble_fraction == pytest.approx(3 / m)
    chunked = tuple(pipeline.StageTimes(0.5, 1.0, 0.5) for _ in range(8))
    assert pipeline._simulate("interleaved", 4, m, 2, chunked, 0.0).bubble_fraction == pytest.approx(3 / (2 * m))
    zero_bubble = pipeline._simulate("zb-h1", 4, m, 1, times, 0.0)
    assert zero_bubble.bubble_fraction == pytest.approx((4 - 1) * (1 + 1 - 1) / (3 * m))  # (p-1)(F + B - W), Qi et al. 2023


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize(("model", "pp", "m"), [("gpt-22b", 4, 16), ("gpt-22b", 8, 64), ("gpt-1t", 16, 64)])
def test_the_ranking_formula_stays_near_the_simulation(schedule: str, model: str, pp: int, m: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    w = layout(model, tp=8, pp=pp, m=m, chunks=chunks, schedule=SCHEDULES.index(schedule))
    played = play(w, FRONTIER, schedule, split_layers(load_model(model), pp * chunks))
    assert float(step_s(w, FRONTIER)) == pytest.approx(played.step_s, rel=0.04)


def test_messages_that_block_cost_more_than_messages_that_flow() -> None:
    w = layout(m=64, pp=8)
    stages = split_layers(load_model("gpt-22b"), 8)
    flowing, blocking = (play(w, replace(FRONTIER, blocking_messages=flag), "1f1b", stages).step_s for flag in (False, True))
    assert blocking > flowing
    free = play(w, without_messages(), "1f1b", stages).step_s
    assert free < flowing


def test_the_last_stage_is_slower_by_its_head() -> None:
    times = pipeline.stage_times(layout(), FRONTIER, split_layers(load_model("gpt-22b"), 4))
    assert times[-1].backward_s > times[1].backward_s
    assert times[0].forward_s > times[1].forward_s
