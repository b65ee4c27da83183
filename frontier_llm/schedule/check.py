"""Checks that the action list of a pipeline rank is complete, and that each action comes after the actions on which it
depends.
"""

from __future__ import annotations

from collections import Counter

from frontier_llm.errors import Problem
from frontier_llm.schedule.actions import COMPUTES, FORWARD_ONLY, Action, Kind, Placement, Schedule, beside
from frontier_llm.schedule.simulate import ScheduleError

SPLIT_BACKWARD = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def check(schedule: Schedule, rank: int) -> None:
    """Raise ScheduleError unless the list of actions of a pipeline rank is legal. The check is cheap enough for every
    start.

    In a legal list each microbatch has exactly one forward on each position of the rank, and one backward after it (B,
    or I and then W). Each message is sent once, after the compute action that produces it. Each receive is posted
    before the compute action that needs it. An evaluation (`forward_only`) has forwards only. A pair has two different
    microbatches.

    Deadlocks between ranks are not checked here: the order of messages that `with_messages` computes excludes them.
    """
    if len(schedule.actions) != schedule.stages:
        raise ScheduleError(f"{len(schedule.actions)} lists of actions for {schedule.stages} stages")
    if problems := _stage_problems(schedule, rank):
        raise ScheduleError(problems)


def _stage_problems(schedule: Schedule, stage: int) -> list[Problem]:
    """Return the problems in the list of actions of one stage. The lists of other stages are not needed."""
    where = f"stage {stage}"
    problems = []
    placement = schedule.placement
    counts = Counter(schedule.actions[stage])
    for action, times in counts.items():
        if times > 1:
            problems.append(Problem(where=where, what=f"{action} occurs {times} times", fix="list each action once"))
    # Lists have hundreds of thousands of actions, so values that depend only on kind and position are computed once.
    positions = placement.positions_of(stage)
    with_messages = {
        (kind, position): (kind, placement.received_by(kind, position), placement.sent_by(kind, position))
        for kind in COMPUTES
        for position in positions
    }
    expected: set[Action] = set()
    for microbatch in range(schedule.microbatches):
        for position in positions:
            kinds = [Kind.FORWARD]
            if schedule.name != FORWARD_ONLY:
                is_split = any(Action(kind, microbatch, position) in counts for kind in SPLIT_BACKWARD)
                kinds += SPLIT_BACKWARD if is_split else [Kind.BACKWARD]
            for kind in kinds:
                expected |= {Action(each, microbatch, position) for each in with_messages[kind, position] if each}
    problems += [
        Problem(where=where, what=f"{action} is missing") for action in sorted(expected - set(counts), key=str)
    ]
    problems += [
        Problem(where=where, what=f"{action} does not belong to this stage")
        for action in sorted(set(counts) - expected, key=str)
    ]
    return problems or _order_problems(schedule, stage)


def _order_problems(schedule: Schedule, stage: int) -> list[Problem]:
    """Return a problem for each action that comes earlier in the list than an action on which it depends."""
    place = {action: index for index, action in enumerate(schedule.actions[stage])}
    problems = []
    earlier = {
        (kind, position): _earlier(schedule.placement, kind, position)
        for kind, position in {(action.kind, action.position) for action in schedule.actions[stage]}
    }
    for index, action in enumerate(schedule.actions[stage]):
        firsts = [Action(kind, action.microbatch, at) for kind, at in earlier[action.kind, action.position]]
        late = [first for first in firsts if place.get(first, -1) > index]
        problems += [Problem(where=f"stage {stage}", what=f"{action} comes before {first}") for first in late]
    for second, first in beside(schedule, stage).items():
        if second.microbatch == first.microbatch:
            problems.append(
                Problem(where=f"stage {stage}", what=f"{second} is paired with {first}, but needs its result")
            )
    return problems


def _earlier(placement: Placement, kind: Kind, position: int) -> list[tuple[Kind, int]]:
    """Return kind and position of the actions of the same microbatch on which an action depends."""
    earlier: list[tuple[Kind | None, int]] = []
    if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        earlier = [(Kind.FORWARD, position), (placement.received_by(kind, position), position), (kind, position + 1)]
    elif kind is Kind.FORWARD:
        earlier = [(placement.received_by(kind, position), position), (kind, position - 1)]
    elif kind is Kind.BACKWARD_WEIGHT:
        earlier = [(Kind.BACKWARD_INPUT, position)]
    elif kind is Kind.SEND_FORWARD:
        earlier = [(Kind.FORWARD, position)]
    elif kind is Kind.SEND_BACKWARD:
        earlier = [(Kind.BACKWARD, position), (Kind.BACKWARD_INPUT, position)]
    return [(first, at) for first, at in earlier if first is not None]
