"""Pairs: a forward and the backward of another microbatch that a rank plays together, so that each one's rows to
experts travel under the other's compute.

Played as one, both begin when both have their inputs, and their messages follow when both have ended. In the order of
communication a pair is one event, however its collectives interleave: whoever shares them plays the same pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from frontier_llm.schedule.actions import Action, Kind, Schedule

_GRADIENTS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def is_pair(first: Action, second: Action) -> bool:
    """Whether of two that follow each other directly the second goes backward through the other position of the
    first, a forward.
    """
    return first.kind is Kind.FORWARD and second.kind in _GRADIENTS and second.position != first.position


def units(actions: Sequence[Action], pairs: bool) -> Iterator[tuple[Action, ...]]:
    """Each action alone or, with `pairs`, two of them."""
    if not pairs:
        yield from zip(actions)
        return
    place = 0
    while place < len(actions):
        two = tuple(actions[place : place + 2])
        unit = two if is_pair(two[0], two[-1]) else two[:1]
        yield unit
        place += len(unit)


def beside(schedule: Schedule, rank: int | None = None) -> dict[Action, Action]:
    """Of each backward in a pair, of one pipeline rank or all, its forward."""
    orders = schedule.compute[slice(rank, None if rank is None else rank + 1)] if schedule.pairs else ()
    return {second: first for order in orders for first, second in pairwise(order) if is_pair(first, second)}
