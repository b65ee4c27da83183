"""Pairs have two different microbatches, no message between their actions, and no circular wait.

The messages of a pair come before and after it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from frontier_llm.schedule import Action, Kind, Schedule, ScheduleError, beside, build, posted_ahead, simulate, units
from frontier_llm.schedule import check as check_rank
from frontier_llm.schedule.dry_run import check_order, steps
from tests.harness.dry_run import check
from tests.unit.schedule.drawn import UNIT, swap


def paired(stages: int, microbatches: int) -> Schedule:
    return build("dualpipe-v", stages, microbatches, 2, pairs=True)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_pairs_end_however_many_communications_are_in_flight(stages: int, more: int) -> None:
    """Tests one communication in flight with the strict order, and many with receives posted before the pair that needs
    them.
    """
    schedule = paired(stages, 2 * stages + more)
    assert len(beside(schedule)) >= stages * more
    check(schedule)
    ahead = replace(schedule, actions=tuple(tuple(posted_ahead(actions, True)) for actions in schedule.actions))
    assert beside(ahead) == beside(schedule)
    for rank in range(stages):
        pairs = {unit[::-1] for unit in units(ahead.actions[rank], True) if len(unit) > 1}
        assert pairs == set(beside(schedule, rank).items()), "no message stands within a pair"
        check_rank(ahead, rank)
    check_order(steps(ahead), None)


def test_only_a_schedule_that_has_pairs_is_played_in_pairs() -> None:
    assert not beside(build("zb-v", 2, 8, 2, pairs=True)) and not beside(build("dualpipe-v", 2, 8, 2))


def test_a_backward_beside_its_own_forward_is_refused() -> None:
    schedule = paired(2, 8)
    (backward, forward), *_ = beside(schedule, 0).items()
    own = Action(Kind.FORWARD, backward.microbatch, forward.position)
    with pytest.raises(ScheduleError, match=rf"{backward} is paired with {own}"):
        check_rank(swap(schedule, 0, own, forward), 0)


def test_a_pair_begins_with_both_inputs_and_its_messages_follow_its_end() -> None:
    schedule = paired(3, 12)
    timeline = simulate(schedule, lambda rank, action: UNIT[action.kind], 0.25)
    spans = {action: (begin, end) for rank in range(3) for action, begin, end in timeline.spans(rank)}
    placement = schedule.placement
    of = beside(schedule)
    sent_s = {
        **{action: end for action, (_, end) in spans.items()},
        **{forward: spans[backward][1] for backward, forward in of.items()},
    }
    for backward, forward in of.items():
        assert spans[forward][1] == spans[backward][0]
        gradient = [
            Action(kind, backward.microbatch, backward.position + 1) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        ]
        inputs = [
            action
            for action in (*gradient, Action(Kind.FORWARD, forward.microbatch, forward.position - 1))
            if action in spans
        ]
        for source in inputs:
            apart = placement.rank_of[source.position] != placement.rank_of[forward.position]
            assert spans[forward][0] >= sent_s[source] + 0.25 * apart - 1e-9
    assert of
