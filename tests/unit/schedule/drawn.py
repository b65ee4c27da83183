"""Schedules for tests: shipped ones, hand-written ones, and ones with a planted mistake."""

from __future__ import annotations

import dataclasses
from collections import deque

from hypothesis import strategies as st

from frontier_llm.schedule import (
    Action,
    Kind,
    Schedule,
    build,
    round_robin,
    with_messages,
)

V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")
SHIPPED = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", *V_SHAPED)
UNIT = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SHIPPED))
    chunks = 2 if name in V_SHAPED else draw(st.integers(1, 4)) if name.startswith("interleaved") else 1
    return build(name, draw(st.integers(1, 9)), draw(st.integers(1, 24)), chunks)


def action(text: str, position: int) -> Action:
    """Return an action from text such as 'SF3', at a position."""
    letters = text.rstrip("0123456789")
    return Action(Kind(letters), int(text.removeprefix(letters)), position)


def custom(*orders: list[str], stages: int | None = None) -> Schedule:
    """Return a schedule from one list of actions per stage, or from the same list on all `stages`.

    Messages are placed in the common order.
    """
    listed = [[action(text, stage) for text in order] for stage, order in enumerate(orders * (stages or 1))]
    placement = round_robin(len(listed))
    return Schedule(
        "custom",
        placement,
        sum(text.startswith("F") for text in orders[0]),
        with_messages(placement, listed),
    )


def at_their_use(schedule: Schedule) -> Schedule:
    """Return the schedule with each receive directly before its use, in the order of the sender."""
    lists = []
    for actions in schedule.actions:
        arriving: deque[Action] = deque()
        used: list[Action] = []
        for one in actions:
            needs = schedule.placement.received_by(one.kind, one.position) if one.kind.computes else None
            while needs and Action(needs, one.microbatch, one.position) in arriving:
                used.append(arriving.popleft())
            (arriving if one.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD) else used).append(one)
        lists.append(tuple(used))
    return dataclasses.replace(schedule, actions=tuple(lists))


def swap(schedule: Schedule, stage: int, first: Action, second: Action) -> Schedule:
    """Return the schedule with two actions of a stage exchanged."""
    change = {first: second, second: first}
    actions = list(schedule.actions)
    actions[stage] = tuple(change.get(action, action) for action in actions[stage])
    return dataclasses.replace(schedule, actions=tuple(actions))


def drop(schedule: Schedule, stage: int, gone: Action) -> Schedule:
    actions = list(schedule.actions)
    actions[stage] = tuple(action for action in actions[stage] if action != gone)
    return dataclasses.replace(schedule, actions=tuple(actions))
