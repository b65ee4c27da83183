"""A simulated timeline respects dependencies and links, and is rendered as text and as a figure."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.schedule import (
    Kind,
    Schedule,
    build,
    render_text,
    simulate,
    timeline_chart,
)
from tests.unit.schedule.drawn import UNIT, schedules


def test_transfers_take_time_and_share_their_link() -> None:
    """Two stages, one microbatch: F, transfer, F, B, transfer, B."""
    timeline = simulate(build("1f1b", 2, 1), lambda _, action: UNIT[action.kind], send_s=0.25)
    assert timeline.makespan_s == 1 + 0.25 + 1 + 2 + 0.25 + 2
    slow_back = simulate(
        build("1f1b", 2, 1),
        lambda _, action: UNIT[action.kind],
        send_s=lambda source, target: 0.25 if source < target else 1,
    )
    assert slow_back.makespan_s == timeline.makespan_s + 0.75
    choked = simulate(build("gpipe", 2, 4), lambda _, action: 0.1, send_s=1.0)
    assert choked.start_s[1][:4] == pytest.approx([1.1, 2.1, 3.1, 4.1])  # one message at a time


@given(schedules(), st.floats(0, 2))
@settings(max_examples=60)
def test_timeline_respects_dependencies(schedule: Schedule, send_s: float) -> None:
    timeline = simulate(schedule, lambda stage, action: UNIT[action.kind] * (1 + 0.1 * stage), send_s)
    begins = {}
    ends = {}
    for stage in range(schedule.stages):
        clock = 0.0
        for action, start_s, end_s in timeline.spans(stage):
            assert start_s >= clock
            assert end_s - start_s == pytest.approx(UNIT[action.kind] * (1 + 0.1 * stage))
            clock = end_s
            name = Kind.BACKWARD if action.kind is Kind.BACKWARD_INPUT else action.kind
            key = (name, action.microbatch, action.position)
            begins[key], ends[key] = start_s, end_s
    rank_of = schedule.placement.rank_of
    for (kind, microbatch, place), start_s in begins.items():
        step = {Kind.FORWARD: -1, Kind.BACKWARD: 1}.get(kind)
        before = step and ends.get((kind, microbatch, place + step))
        if before is not None:
            assert step is not None
            # At the turning point of a V, two neighbouring positions are on the same rank and send no message.
            across = 0.0 if rank_of[place] == rank_of[place + step] else send_s
            assert start_s >= before + across - 1e-9
        if kind is Kind.BACKWARD:
            assert start_s >= ends[(Kind.FORWARD, microbatch, place)]


@pytest.mark.thorough
def test_a_trillion_parameter_schedule_simulates_in_seconds() -> None:
    """1600 microbatches on 64 stages are 614,000 actions.

    They take about 0.6 s on one core. The bound is 20 times that, for slow machines.
    """
    schedule = build("1f1b", 64, 1600)
    begin_s = time.process_time()
    timeline = simulate(schedule, lambda _, action: UNIT[action.kind])
    assert time.process_time() - begin_s < 12
    assert timeline.bubble_fraction == pytest.approx(63 / 1600)


def test_text_shows_stages_idle_time_and_bubble() -> None:
    text = render_text(simulate(build("1f1b", 2, 2), lambda _, action: UNIT[action.kind]))
    assert text.splitlines() == [
        "stage 0 |F0 F1 ······B0    ···B1    ",
        "stage 1 |···F0 B0    F1 B1    ······",
        "1f1b, 2 stages, 2 microbatches: makespan 9, bubble 50.0% of compute",
    ]


def test_long_text_is_cut_and_says_so() -> None:
    lines = render_text(simulate(build("gpipe", 3, 50), lambda _, action: UNIT[action.kind]), columns=60).splitlines()
    assert all(line.endswith("…") and len(line) == len("stage 0 |") + 60 for line in lines[:3])


def test_the_figure_shows_every_action_and_what_is_idle() -> None:
    chart = timeline_chart(
        simulate(build("interleaved", 2, 4, 2), lambda _, action: UNIT[action.kind]), "units of time"
    )
    idle, *kinds = chart.traces
    assert [trace["name"] for trace in chart.traces] == ["idle", "forward", "backward"]
    assert idle["y"] == [0, 1] and idle["x"][0] == max(
        base + x for trace in kinds for base, x in zip(trace["base"], trace["x"], strict=True)
    )
    assert [len(trace["x"]) for trace in kinds] == [16, 16]  # 4 microbatches, 2 chunks, 2 ranks
    assert kinds[0]["hovertext"][0] == "forward, microbatch 0, virtual stage 0"
    assert len(set(kinds[0]["marker"]["color"])) == 2, "a rank's second chunk is lighter"
