"""What a rank may play of its next step before all have ended this one, and what that saves."""

from __future__ import annotations

from functools import partial

import pytest

from frontier_llm.schedule import (
    Action,
    Follows,
    Kind,
    Schedule,
    ahead,
    build,
    names,
    one_end,
    rule,
    simulate,
    simulate_in_turn,
)

UNIT = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


def built(name: str, stages: int, microbatches: int) -> Schedule:
    chunks = 2 if "interleaved" in name or one_end(name) else 1
    return build(name, stages, microbatches, chunks)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (4, 3), (4, 9), (7, 20)])
def test_on_neither_side_of_the_border_a_message_has_one_end_only(name: str, stages: int, microbatches: int) -> None:
    schedule = built(name, stages, microbatches)
    first = {
        action for actions, place in zip(schedule.actions, ahead(schedule), strict=True) for action in actions[:place]
    }
    assert {action.kind for action in first} <= {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD}
    for kind, microbatch, position in first:
        if kind is Kind.SEND_FORWARD:
            assert Action(Kind.RECV_FORWARD, microbatch, position + 1) in first
        if kind is Kind.RECV_FORWARD:
            assert Action(Kind.SEND_FORWARD, microbatch, position - 1) in first


@pytest.mark.parametrize("name", names())
def test_a_schedule_says_whether_its_ranks_end_one_after_the_other(name: str) -> None:
    assert any(ahead(built(name, 8, 32))) == rule(name).staggered


def period(schedule: Schedule, synchronous: bool, send_s: float = 0.0, in_turn: bool = False) -> float:
    """Units from one step to the next, an optimizer step of 2 units between."""
    play = partial(simulate_in_turn, waits=True) if in_turn else simulate
    ended = 0.0
    ends = [0.0] * schedule.stages
    for _ in range(4):
        ended = max(ends)
        begins = [ended + 2.0] * schedule.stages if synchronous else [end + 2.0 for end in ends]
        follows = Follows(begins, ahead(schedule))

        def duration(rank: int, action: Action) -> float:
            return UNIT[action.kind]

        ends = [times[-1] for times in play(schedule, duration, send_s, follows=follows).end_s]
    return max(ends) - ended


def test_the_bubble_of_zb_h2_is_gone_where_its_steps_overlap() -> None:
    schedule = built("zb-h2", 8, 32)
    assert period(schedule, synchronous=True) == 3 * 32 + 7 + 2
    assert period(schedule, synchronous=False) == 3 * 32 + 2


def test_with_one_communication_in_flight_overlapping_steps_gain_too() -> None:
    schedule = built("zb-h2", 4, 16)
    assert period(schedule, False, 0.05, in_turn=True) < period(schedule, True, 0.05, in_turn=True) - 2
    assert period(built("1f1b", 4, 16), False, 0.05) == pytest.approx(period(built("1f1b", 4, 16), True, 0.05))
