"""The checker finds every mistake that a schedule can have."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.errors import FrontierError
from frontier_llm.planner.candidates import parse_fixed
from frontier_llm.schedule import (
    Action,
    Channel,
    Kind,
    Placement,
    Schedule,
    ScheduleError,
    ScheduleRule,
    build,
    register,
    registry,
    round_robin,
    rule,
    simulate,
)
from tests.harness.dry_run import check
from tests.unit.schedule.drawn import action, custom, drop, schedules, swap


@given(schedules(), st.data())
@settings(max_examples=100)
def test_check_finds_any_dropped_action(schedule: Schedule, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, schedule.stages - 1))
    gone = data.draw(st.sampled_from(schedule.actions[stage]))
    with pytest.raises(ScheduleError, match=f"{gone} is missing"):
        check(drop(schedule, stage, gone))


def test_check_finds_a_repeated_action() -> None:
    schedule = build("1f1b", 2, 3)
    twice = dataclasses.replace(
        schedule,
        actions=(schedule.actions[0] + (Action(Kind.BACKWARD, 2, 0),), schedule.actions[1]),
    )
    with pytest.raises(ScheduleError, match="B2@0 occurs 2 times"):
        check(twice)


def test_check_finds_a_missing_stage() -> None:
    schedule = build("1f1b", 2, 3)
    with pytest.raises(ScheduleError, match="1 lists of actions for 2 stages"):
        check(dataclasses.replace(schedule, actions=schedule.actions[:1]))


@pytest.mark.parametrize(
    ("name", "stage", "first", "second", "says"),
    [
        ("1f1b", 1, "F0", "B0", "B0@1 comes before F0@1"),
        ("zb-h1", 0, "I1", "W1", "W1@0 comes before I1@0"),
        ("1f1b", 0, "F0", "SF0", "SF0@0 comes before F0@0"),
        ("1f1b", 1, "RF1", "F1", "F1@1 comes before RF1@1"),
        ("zb-h1", 1, "I1", "SB1", "SB1@1 comes before I1@1"),
    ],
)
def test_check_finds_wrong_order(name: str, stage: int, first: str, second: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        check(swap(build(name, 2, 3), stage, action(first, stage), action(second, stage)))


def test_check_finds_messages_out_of_step() -> None:
    schedule = build("gpipe", 2, 3)
    swapped = swap(schedule, 1, action("RF0", 1), action("RF1", 1))
    swapped = swap(swapped, 1, action("F0", 1), action("F1", 1))
    with pytest.raises(ScheduleError, match="channel"):
        check(swapped)


def test_stages_that_wait_for_each_other_have_no_order() -> None:
    """Stage 0 needs the gradient of microbatch 0 before it sends microbatch 1. Stage 1 needs microbatch 1 first."""
    with pytest.raises(ScheduleError) as caught:
        custom(["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"])
    assert "stage 0: deadlock: B0@0 waits for another rank's action, and that action never starts" in str(caught.value)
    assert "stage 1: deadlock: F1@1 waits for another rank's action, and that action never starts" in str(caught.value)


def test_check_finds_a_deadlock_between_stages() -> None:
    legal = custom(["F0", "F1", "B0", "B1"], ["F0", "F1", "B0", "B1"])
    first = tuple(action(text, 0) for text in ("F0", "SF0", "RB0", "B0", "F1", "SF1", "RB1", "B1"))
    with pytest.raises(ScheduleError, match="deadlock: waits for"):
        check(dataclasses.replace(legal, actions=(first, legal.actions[1])), in_flight=None)


def test_check_finds_a_wrong_order_on_one_rank() -> None:
    """Chunk 1 runs before chunk 0, and both are on the same rank."""
    order = tuple(Action(kind, 0, position) for kind in (Kind.FORWARD, Kind.BACKWARD) for position in (1, 0))
    with pytest.raises(ScheduleError, match=r"F0@1 comes before F0@0"):
        check(Schedule("custom", Placement((0, 0)), 1, (order,)))


@pytest.mark.parametrize(
    "placement",
    [round_robin(2), round_robin(5), round_robin(2, 2), round_robin(3, 2), Placement((0, 1, 2, 2, 1, 0))],
)
def test_both_ends_agree_on_the_channel_and_a_pair_has_one_writer(placement: Placement) -> None:
    pairs = ((Kind.SEND_FORWARD, Kind.RECV_FORWARD), (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD))
    writers: dict[tuple[Channel, frozenset[int]], set[int]] = {}
    for (send, receive), (position, rank) in itertools.product(pairs, enumerate(placement.rank_of)):
        other = placement.other_end(send, position)
        if not 0 <= other <= placement.last or placement.rank_of[other] == rank:
            continue
        assert placement.rank_of[other] == placement.peer(send, position) and placement.peer(receive, other) == rank
        assert placement.channel(send, position) is placement.channel(receive, other)
        pair = frozenset((rank, placement.rank_of[other]))
        writers.setdefault((placement.channel(send, position), pair), set()).add(rank)
        assert (rank, placement.rank_of[other]) in placement.streams[placement.channel(send, position)]
    assert all(len(ranks) == 1 for ranks in writers.values())
    assert set(placement.streams) == {channel for channel, _ in writers}


def test_the_turn_of_a_v_needs_no_message() -> None:
    v = Placement((0, 1, 1, 0))
    assert (v.ranks, v.chunks, v.ends, v.positions_of(0), v.positions_of(1)) == (2, 2, (0,), (0, 3), (1, 2))
    assert [v.sent_by(Kind.FORWARD, position) for position in range(4)] == [
        Kind.SEND_FORWARD,
        None,
        Kind.SEND_FORWARD,
        None,
    ]
    assert (
        v.channel(Kind.SEND_FORWARD, 0) is Channel.FORWARD and v.channel(Kind.SEND_FORWARD, 2) is Channel.FORWARD_WRAP
    )


def _backward_first(placement: Placement, microbatches: int, rank: int) -> list[Action]:
    usual = rule("1f1b").order(placement, microbatches, rank)
    return usual if rank else sorted(usual, key=lambda action: action.kind is Kind.FORWARD)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (lambda placement, microbatches, rank: placement.stages, r"raises AttributeError: .*test_check.py, line \d+"),
        (lambda placement, microbatches, rank: None, "is None"),
        (lambda placement, microbatches, rank: [], r"is \[\]"),
        (lambda placement, microbatches, rank: [(Kind.FORWARD, rank)], r"has \(<Kind.FORWARD: 'F'>, 0\)"),
        (lambda placement, microbatches, rank: [Action(Kind.SEND_FORWARD, 0, rank)], "compute kinds"),
        (_backward_first, "deadlock: B0@0 waits"),
    ],
    ids=["fails", "nothing", "empty", "no action", "a message", "deadlock"],
)
def test_a_wrong_order_of_a_plugin_is_an_error_for_people(order, expected, monkeypatch):
    """Checks schedules with and without messages. The engine needs messages, and the planner's simulation does not."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    register("Mine", ScheduleRule(order))
    assert parse_fixed(["schedule=Mine"]) == {"schedule": "Mine"}, "plan --fix accepts a plugin's schedule"
    for messages in (True, False):
        with pytest.raises(FrontierError, match=expected):
            simulate(build("Mine", 2, 4, messages=messages), lambda rank, action: 1.0)
    build.cache_clear()
