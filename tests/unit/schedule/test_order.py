"""With one communication in flight, the common order of communication has no circular wait. Orders with planted faults
deadlock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from frontier_llm.schedule import Action, Kind, Placement, Schedule, ScheduleError, build, with_messages
from frontier_llm.schedule.dry_run import Call, CollectiveLists, ListEntry, check_order, steps
from tests.harness.dry_run import calls, check

CASES = [
    (name, pp, m, v)
    for name, vs in (("gpipe", (1,)), ("1f1b", (1,)), ("zb-h1", (1,)), ("interleaved", (2, 3)))
    for pp in (2, 3, 5)
    for m in (1, 4, 7)
    for v in vs
]


def inside_and_behind(schedule: Schedule, tied: bool = True) -> CollectiveLists:
    """Return two tp sums for each action and a dp sum for the last backward of each virtual stage.

    The step ends with tied and world sums.
    """
    tp: list[Call] = [("tp", "all_reduce")] * 2
    last = Counter[int]()
    instead = {}
    for actions in schedule.compute:
        for action in reversed(actions):
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) and not last[action.position]:
                last[action.position] = 1
                instead[action] = [tp[0], ("dp", "reduce_scatter"), tp[1]]
    kinds = [kind for kind in Kind if kind.computes]
    world: list[Call] = [("world", "all_reduce")] * 2
    behind = dict.fromkeys(range(schedule.stages), world)
    if tied and len(schedule.placement.ends) > 1:
        behind |= {rank: [("tied", "all_reduce"), ("dp", "reduce_scatter"), *world] for rank in schedule.placement.ends}
    inside = {(kind, position): tp for kind in kinds for position in range(len(schedule.placement.rank_of))}
    return CollectiveLists(inside, instead, [("dp", "all_reduce")], behind)


def posted_ahead_of_use(schedule: Schedule) -> Schedule:
    """Place each receive one compute action before its use, in the order of its sender.

    Pipelines without a common order of communication do this.
    """
    placement = schedule.placement
    lists = []
    for rank, order in enumerate(schedule.compute):
        placed: list[Action] = []
        arriving = {
            kind: [a for a in schedule.actions[rank] if a.kind is kind]
            for kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)
        }

        def post_for(
            action: Action,
            placed: list[Action] = placed,
            arriving: dict[Kind, list[Action]] = arriving,
        ) -> None:
            needs = placement.received_by(action.kind, action.position)
            while needs and Action(needs, action.microbatch, action.position) in arriving[needs]:
                placed.append(arriving[needs].pop(0))

        for action, ahead in zip(order, [*order[1:], None], strict=True):
            post_for(action)
            send = placement.sent_by(action.kind, action.position)
            needs = ahead and placement.received_by(ahead.kind, ahead.position)
            same = (
                send
                and ahead
                and needs
                and placement.channel(send, action.position) is placement.channel(needs, ahead.position)
            )
            if ahead and not same:
                post_for(ahead)
            placed.append(action)
            if send:
                placed.append(Action(send, action.microbatch, action.position))
            if ahead:
                post_for(ahead)
        lists.append(tuple(placed))
    return replace(schedule, actions=tuple(lists))


@pytest.mark.parametrize("name, pp, m, v", CASES)
@pytest.mark.parametrize("tp, dp, tied", [(1, 1, False), (2, 1, False), (1, 2, True), (2, 2, True)])
def test_one_in_flight_is_enough(name: str, pp: int, m: int, v: int, tp: int, dp: int, tied: bool) -> None:
    schedule = build(name, pp, m, v)
    listed = steps(schedule, inside_and_behind(schedule, tied), tp, dp)
    assert len(listed) == pp * tp * dp
    check_order(listed)
    check_order(listed, in_flight=2)


@pytest.mark.parametrize(
    "name, pp, m, v",
    [case for case in CASES if case[2] > 1 and case[0] in ("1f1b", "interleaved", "zb-h1")],
)
def test_receives_posted_ahead_of_their_use_hang_with_one_in_flight(name: str, pp: int, m: int, v: int) -> None:
    """The reason for a common order: each rank's own order is legal with unlimited communications in flight, and
    deadlocks with one communication in flight.
    """
    ahead = posted_ahead_of_use(build(name, pp, m, v))
    check(ahead, in_flight=None)
    with pytest.raises(ScheduleError, match="deadlock: waits for"):
        check(ahead)


@pytest.mark.parametrize(
    "name, pp, m, v, rank",
    [("1f1b", 2, 4, 1, 0), ("1f1b", 3, 7, 1, 1), ("zb-h1", 5, 7, 1, 3), ("interleaved", 3, 7, 2, 0)],
)
def test_two_entries_exchanged_on_one_rank_hang(name: str, pp: int, m: int, v: int, rank: int) -> None:
    """A send and the receive of its answer are exchanged. The rank then waits forever for the answer."""
    schedule = build(name, pp, m, v)
    actions = list(schedule.actions[rank])
    send = next(
        i for i, a in enumerate(actions) if a.kind.sends and schedule.placement.peer(a.kind, a.position) == rank + 1
    )
    answer = next(i for i in range(send, len(actions)) if actions[i] == Action(Kind.RECV_BACKWARD, *actions[send][1:]))
    actions.insert(send, actions.pop(answer))
    faulty = replace(
        schedule,
        actions=tuple(tuple(actions) if stage == rank else each for stage, each in enumerate(schedule.actions)),
    )
    with pytest.raises(
        ScheduleError,
        match=rf"rank {rank}: deadlock: waits for B\d+@{actions[send].position + 1}'s message",
    ):
        check(faulty)
    check_order(steps(schedule))


def test_a_collective_before_the_message_that_its_peer_is_computed_from_hangs() -> None:
    """On one of two tensor-parallel ranks the receive comes before another action's sum.

    The sender of the message waits for the result of that sum.
    """
    schedule = build("1f1b", 2, 4)
    collectives = inside_and_behind(schedule)
    listed = steps(schedule, collectives, tp=2)
    check_order(listed)
    one = listed[0]
    receive = next(index for index, step in enumerate(one) if step.what.startswith("B0@1"))
    forward = next(index for index, step in enumerate(one) if step.what == "F0@0")
    moved = [one[receive], *(step for index, step in enumerate(one) if index != receive)]
    places = {index: index + 1 if index < receive else index for index in range(len(one))} | {receive: 0}
    listed[0] = [step._replace(after=tuple(places[index] for index in step.after)) for step in moved]
    assert forward < receive
    with pytest.raises(ScheduleError, match="rank 0: deadlock: waits for B0@1's message") as caught:
        check_order(listed)
    assert len(caught.value.problems) == 4  # in the end all ranks wait


def test_tied_and_world_sums_exchanged_hang_and_are_named() -> None:
    schedule = build("gpipe", 3, 2)
    collectives = inside_and_behind(schedule)
    behind = dict(collectives.behind)
    behind[0] = [behind[0][2], *behind[0][:2], *behind[0][3:]]
    with pytest.raises(ScheduleError, match="rank 4: deadlock: waits for tied all_reduce behind the last action"):
        check_order(steps(schedule, replace(collectives, behind=behind), dp=2))


def test_a_collective_of_another_kind_is_a_mistake_and_not_a_match() -> None:
    with pytest.raises(ScheduleError, match="rank 1 starts tp all_gather, but rank 0 starts tp all_reduce"):
        check_order([[ListEntry("tp all_reduce", "tp", (0, 1))], [ListEntry("tp all_gather", "tp", (0, 1))]])


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_a_v_has_an_order_too(stages: int, microbatches: int) -> None:
    """All forwards run down the ranks and up again, then all backwards.

    No message is needed at the turning point, which is on one rank.
    """
    placement = Placement((*range(stages), *reversed(range(stages))))
    orders = [
        [
            Action(kind, microbatch, position)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for position in placement.positions_of(rank)[:: 1 if kind is Kind.FORWARD else -1]
            for microbatch in range(microbatches)
        ]
        for rank in range(stages)
    ]
    schedule = Schedule("v", placement, microbatches, with_messages(placement, orders))
    check(schedule)
    check_order(steps(schedule, inside_and_behind(schedule), tp=2, dp=2))
    messages = sum(not action.kind.computes for actions in schedule.actions for action in actions)
    # one of the 2·pp - 1 pairs of neighbours is on the same rank
    assert messages == 4 * 2 * (stages - 1) * microbatches


def test_calls_are_what_a_ledger_has() -> None:
    schedule = build("1f1b", 2, 1)
    collectives = inside_and_behind(schedule)
    tp = ("tp", "all_reduce")
    assert list(calls(schedule, 0, collectives)) == [
        ("dp", "all_reduce"), tp, tp, ("pp.forward", "send"), ("pp.backward", "recv"), tp, ("dp", "reduce_scatter"), tp,
        ("tied", "all_reduce"), ("dp", "reduce_scatter"), ("world", "all_reduce"), ("world", "all_reduce"),
    ]  # fmt: skip
