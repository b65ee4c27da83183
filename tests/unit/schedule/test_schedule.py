"""Every schedule is legal and deadlock-free, and both ends of a channel agree."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.errors import LayoutError
from frontier_llm.schedule import (
    FORWARD_ONLY,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    build,
    forward_only,
    posted_ahead,
    round_robin,
    rule,
    with_messages,
)
from tests.harness.dry_run import check
from tests.unit.schedule.drawn import SHIPPED, V_SHAPED, at_their_use, custom, schedules


@given(schedules())
@settings(max_examples=150)
def test_every_schedule_is_legal_and_deadlock_free(schedule: Schedule) -> None:
    """Legal with one communication in flight on each rank, and therefore with any bound, in training and evaluation."""
    check(schedule)
    check(schedule, in_flight=None)
    check(forward_only(schedule))


def test_evaluation_has_the_forwards_alone() -> None:
    schedule = build("interleaved", 2, 3, 2)
    kinds = {action.kind for actions in forward_only(schedule).actions for action in actions}
    assert kinds == {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD}
    with pytest.raises(ScheduleError, match="B0@0 does not belong to this stage"):
        check(dataclasses.replace(schedule, name=forward_only(schedule).name))


def test_check_finds_a_deadlock_of_bounded_sends() -> None:
    """All of chunk 0 runs before all of chunk 1.

    The last stage's messages for chunk 1 accumulate while stage 0 still sends chunk 0.
    """
    placement = round_robin(2, 2)
    orders = [
        [Action(Kind.FORWARD, microbatch, position) for position in held for microbatch in range(32)]
        for held in ((0, 2), (1, 3))
    ]
    # The messages are received when they arrive, into 31 buffers.
    check(Schedule(FORWARD_ONLY, placement, 32, with_messages(placement, orders)))
    piled = at_their_use(Schedule(FORWARD_ONLY, placement, 32, with_messages(placement, orders)))
    check(piled, in_flight=None)
    with pytest.raises(ScheduleError, match="deadlock: waits for F"):
        check(piled, in_flight=15)


def pending_receives(schedule: Schedule, actions: Sequence[Action]) -> int:
    """Return the peak number of receives of one kind that are posted and not yet consumed.

    This is the number of receive buffers of a direction.
    """
    peak = 0
    pending = Counter[Kind]()
    for action in actions:
        if action.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
            pending[action.kind] += 1
            peak = max(peak, pending[action.kind])
        elif action.kind.computes and (needs := schedule.placement.received_by(action.kind, action.position)):
            pending[needs] -= 1
    return peak


@given(schedules())
@settings(max_examples=100)
def test_few_receives_are_pending(schedule: Schedule) -> None:
    most = 2 if schedule.chunks == 1 else schedule.stages
    assert all(pending_receives(schedule, actions) <= most for actions in schedule.actions)


@given(schedules())
@settings(max_examples=100)
def test_receives_posted_ahead_leave_the_messages_in_sequence(schedule: Schedule) -> None:
    for actions in schedule.actions:
        ahead = posted_ahead(actions)
        for wanted in (True, False):
            assert [a for a in ahead if a.kind.computes is wanted] == [a for a in actions if a.kind.computes is wanted]
    early = dataclasses.replace(schedule, actions=tuple(tuple(posted_ahead(actions)) for actions in schedule.actions))
    check(early)


@given(schedules())
@settings(max_examples=100)
def test_sends_follow_their_compute_directly(schedule: Schedule) -> None:
    """Only other messages may come between a compute action and its send."""
    makes = {Kind.SEND_FORWARD: (Kind.FORWARD,), Kind.SEND_BACKWARD: (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
    for actions in schedule.actions:
        for action in actions:
            if action.kind.computes:
                last = action
            elif action.kind in makes:
                assert last.kind in makes[action.kind]
                assert (last.microbatch, last.position) == (action.microbatch, action.position)


@pytest.mark.parametrize("name", SHIPPED)
def test_one_stage_communicates_nothing(name: str) -> None:
    schedule = build(name, 1, 5, rule(name).chunks[-1 if name in V_SHAPED else 0])
    check(schedule)
    assert schedule.actions == schedule.compute


@given(schedules())
@settings(max_examples=50)
def test_a_schedule_for_simulation_has_the_same_compute(schedule: Schedule) -> None:
    bare = build(schedule.name, schedule.stages, schedule.microbatches, schedule.chunks, messages=False)
    assert bare.compute == schedule.compute == bare.actions
    assert bare.length == schedule.length == sum(map(len, schedule.actions))


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_communication_fits_any_order_of_compute(forwards: list[int], backwards: list[int]) -> None:
    """A schedule with all forwards in any order and then all backwards in any order is legal, if the orders are equal
    on all stages.
    """
    check(custom([f"F{m}" for m in forwards] + [f"B{m}" for m in backwards], stages=3))


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_stages_may_disagree_on_the_order(first: list[int], second: list[int]) -> None:
    """Stage 1 consumes in another order than stage 0 sends.

    Receives follow the sender's order, so that the FIFO still matches.
    """
    check(custom(*([f"F{m}" for m in order] + [f"B{m}" for m in range(4)] for order in (first, second))))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("2f2b", (2, 4, 1)), ("1f1b", (0, 4, 1)), ("gpipe", (2, 0, 1)), ("interleaved", (2, 4, 0)), ("zb-h1", (2, 4, 2))],
)
def test_build_refuses(name: str, sizes: tuple[int, int, int]) -> None:
    with pytest.raises(LayoutError):
        build(name, *sizes)


def test_build_reports_all_problems_at_once() -> None:
    with pytest.raises(LayoutError) as caught:
        build("1f1", 0, 0)
    assert len(caught.value.problems) == 3
    assert "did you mean '1f1b'" in str(caught.value)
