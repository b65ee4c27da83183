"""Counts the activations that a schedule keeps and the calls of a rank, and checks a complete schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from frontier_llm import schedule as schedules
from frontier_llm.schedule import Action, Kind, Schedule
from frontier_llm.schedule.dry_run import Call, CollectiveLists, check_order, steps


def check(schedule: Schedule, in_flight: int | None = 1) -> None:
    """Raise ScheduleError unless every rank's list is legal and all ranks finish with `in_flight` communications at a
    time.
    """
    for rank in range(schedule.stages):
        schedules.check(schedule, rank)
    check_order(steps(schedule), in_flight)


def in_flight(schedule: Schedule, stage: int) -> int:
    """Return the peak number of (microbatch, position) activations that a stage keeps.

    An activation is kept from F to B, or from F to W if the backward is split.
    """
    return max(alive for alive, _ in _alive(schedule.compute[stage]))


def waiting(schedule: Schedule, stage: int) -> int:
    """Return the peak number of activations that a stage keeps between I (input gradient) and W (weight gradients).

    They are counted after each forward.
    """
    return max(late for _, late in _alive(schedule.compute[stage]))


def _alive(actions: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """Yield (activations kept, activations between I and W) after each forward."""
    counts = Counter[Kind]()
    for action in actions:
        counts[action.kind] += 1
        if action.kind is Kind.FORWARD:
            late = counts[Kind.BACKWARD_INPUT] - counts[Kind.BACKWARD_WEIGHT]
            yield counts[Kind.FORWARD] - counts[Kind.BACKWARD] - counts[Kind.BACKWARD_WEIGHT], late


def calls(schedule: Schedule, rank: int, collectives: CollectiveLists) -> Iterator[Call]:
    """Yield the communication calls that the ledger of a pipeline rank records in a step."""
    yield from collectives.before
    for action in schedule.actions[rank]:
        if action.kind.computes:
            yield from collectives.of(action)
        else:
            operation = "send" if action.kind.sends else "recv"
            yield f"pp.{schedule.placement.channel(action.kind, action.position).value}", operation
    yield from collectives.behind.get(rank, ())
