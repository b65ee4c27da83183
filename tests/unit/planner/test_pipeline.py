"""The simulated step: extended schedules equal the full list, and exact closed forms equal the simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from frontier_llm.blueprint.layout import Layout
from frontier_llm.config.load import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.planner import pipeline
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.links import cost_of_one, safety_words
from frontier_llm.planner.pipeline import simulate_step
from frontier_llm.planner.search import simulate_layout
from frontier_llm.schedule import one_end
from frontier_llm.topology.plan import split_layers

FRONTIER = rates(load_machine("frontier"))  # one communication in flight
MANY = replace(FRONTIER, one_in_flight=False)


MODEL = load_model("gpt-22b")


def layout(**changes: Any) -> Layout:
    return Layout(**{"tp": 4, "pp": 4, "dp": 2, "microbatches": 16, **changes})


def without_messages(numbers: Rates = FRONTIER) -> Rates:
    """Return the rates of the machine with messages that take no time."""
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
        ("zb-v", 8, 2, 200),
        ("dualpipe-v", 8, 2, 200),
        ("v-half", 8, 2, 200),
        ("v-min", 4, 2, 150),
    ],
)
@pytest.mark.parametrize("machine", ["frontier", "a100"])
def test_extended_schedules_equal_the_full_list(
    schedule: str,
    pp: int,
    chunks: int,
    m: int,
    machine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = rates(load_machine(machine))
    spread = layout(pp=pp, chunks=chunks, microbatches=m, schedule=schedule)
    stages = split_layers(MODEL, pp * chunks)
    short = simulate_step(MODEL, spread, numbers, stages)
    assert short.timeline.schedule.microbatches < m  # otherwise no schedule was extended
    monkeypatch.setattr(pipeline, "STEADY_MICROBATCHES", 10**6)
    full = simulate_step(MODEL, spread, numbers, stages)
    assert full.timeline.schedule.microbatches == m
    assert short.step_s == pytest.approx(full.step_s, rel=1e-9)
    assert short.end_s == pytest.approx(full.end_s, rel=1e-9)
    assert short.busy_s == pytest.approx(full.busy_s, rel=1e-9)


@pytest.mark.parametrize("m", [8, 32])
def test_equal_stages_give_the_closed_form_bubble(m: int) -> None:
    """The idle time is (pp - 1) / m of the compute time, for 1F1B with equal stages and free messages (SC21, section
    2.2).
    """
    times = tuple(pipeline.StageTimes(1.0, 2.0, 1.0) for _ in range(4))
    timeline = pipeline.simulate_schedule("1f1b", 4, m, 1, times, 0.0)
    assert timeline.bubble_fraction == pytest.approx(3 / m)
    chunked = tuple(pipeline.StageTimes(0.5, 1.0, 0.5) for _ in range(8))
    assert pipeline.simulate_schedule("interleaved", 4, m, 2, chunked, 0.0).bubble_fraction == pytest.approx(
        3 / (2 * m)
    )
    zero_bubble = pipeline.simulate_schedule("zb-h1", 4, m, 1, times, 0.0)
    # (p-1)(F + B - W), Qi et al. 2023
    assert zero_bubble.bubble_fraction == pytest.approx((4 - 1) * (1 + 1 - 1) / (3 * m))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "v-half", "v-min"])
@pytest.mark.parametrize(("model", "pp", "m"), [("gpt-22b", 4, 16), ("gpt-22b", 8, 64), ("gpt-1t", 16, 64)])
def test_the_ranking_formula_stays_near_the_simulation(schedule: str, model: str, pp: int, m: int) -> None:
    chunks = 2 if schedule == "interleaved" or one_end(schedule) else 1
    spread = layout(tp=8, pp=pp, microbatches=m, chunks=chunks, schedule=schedule)
    shape = load_model(model)
    for numbers in (MANY, FRONTIER):
        simulated = simulate_step(shape, spread, numbers, split_layers(shape, pp * chunks))
        # With one in flight the interleaved schedule differs from each closed form by up to 0.2.
        if schedule != "interleaved" or numbers is MANY:
            # V-Min has no slack. If F, I and W differ, it waits in each microbatch, which only the simulation models.
            near = {"zb-h1": 0.05, "dualpipe-v": 0.05, "v-min": 0.25}.get(schedule, 0.04)
            assert float(step_s(shape, spread, numbers)) == pytest.approx(simulated.step_s, rel=near)


def test_one_in_flight_by_hand() -> None:
    """Two stages with a forward of 1 s, a backward of 2 s and messages of 0.5 s.

    The expected times are computed by hand.
    """
    times = tuple(pipeline.StageTimes(1.0, 2.0, 1.0) for _ in range(2))
    for in_flight in ("many", "one", "waiting"):
        # F0 m F0 B0 m B0: no other work can overlap.
        assert pipeline.simulate_schedule("1f1b", 2, 1, 1, times, 0.5, in_flight).makespan_s == 7.0
    waiting = pipeline.simulate_schedule("1f1b", 2, 2, 1, times, 0.5, "waiting")
    # Stage 0: F0 0-1, its message until 1.5, F1 until 2.5. The second message waits until stage 1 takes it, which
    # delays stage 0's B0.
    assert list(waiting.spans(0))[1][1:] == (1.5, 2.5) and waiting.makespan_s == 11.0
    one = pipeline.simulate_schedule("1f1b", 2, 2, 1, times, 0.5, "one")
    assert list(one.spans(0))[1][1:] == (1.0, 2.0) and one.makespan_s <= waiting.makespan_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_turns_cost_time_and_free_messages_none(schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    times = tuple(pipeline.StageTimes(1.0, 2.0, 1.0) for _ in range(4 * chunks))
    many, one, waiting = (
        pipeline.simulate_schedule(schedule, 4, 12, chunks, times, 0.1, in_flight).makespan_s
        for in_flight in ("many", "one", "waiting")
    )
    assert many < one < waiting
    free = [
        pipeline.simulate_schedule(schedule, 4, 12, chunks, times, 0.0, in_flight).makespan_s
        for in_flight in ("many", "one")
    ]
    assert free[0] == pytest.approx(free[1])


def test_the_plan_says_what_safety_costs() -> None:
    frontier = load_machine("frontier")
    one = simulate_layout(MODEL, layout(microbatches=64), FRONTIER)
    cost = cost_of_one(one, FRONTIER)
    assert cost is not None and 0 < cost < 0.1 and cost_of_one(one, MANY) is None
    (line,) = safety_words(one, frontier, FRONTIER)
    assert (
        line.startswith(f"  one communication in flight (comm.in_flight) costs {100 * cost:.1f} % of this step")
        and "rccl#2191" in line
    )


def test_messages_that_block_cost_more_than_messages_that_flow() -> None:
    spread = layout(microbatches=64, pp=8)
    stages = split_layers(MODEL, 8)
    flowing, blocking = (
        simulate_step(MODEL, spread, replace(MANY, blocking_messages=flag), stages).step_s for flag in (False, True)
    )
    assert blocking > flowing
    free = simulate_step(MODEL, spread, without_messages(MANY), stages).step_s
    assert free < flowing


def test_the_last_stage_is_slower_by_its_head() -> None:
    times = pipeline.stage_times(MODEL, layout(), FRONTIER, split_layers(MODEL, 4))
    assert times[-1].backward_s > times[1].backward_s
    assert times[0].forward_s > times[1].forward_s
