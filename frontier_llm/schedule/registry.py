"""Schedules by name. A new one is one function and one call of `register`; everything else asks here.

    def order(placement, microbatches, rank):          # what the rank computes, in order
        ...
    schedule.register("mine", schedule.ScheduleRule(order))

Messages, channels, memory, simulation and figure follow from the order of compute and the placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from frontier_llm.errors import LayoutError, Problem, nearest, suggest
from frontier_llm.schedule.actions import FORWARD_ONLY, Action, Kind, Placement, Schedule, round_robin
from frontier_llm.schedule.order import with_messages

Number = Any  # int, or a numpy array of ints: many layouts at once
Formula = Callable[[Number, Number, Number, Number], Number]  # of (stages, microbatches, chunks, stage)


@dataclass(frozen=True)
class ScheduleRule:
    """What makes a schedule."""

    order: Callable[[Placement, int, int], list[Action]]  # (placement, microbatches, rank) → the rank's compute actions
    placement: Callable[[int, int], Placement] = round_robin  # (stages, chunks) → who holds what
    chunks: Sequence[int] = (1,)  # allowed virtual stages per rank
    splits_backward: bool = False  # I and W instead of B
    # most virtual-stage activations that a stage keeps, from F to B or W; None: a bound is used, and finalists are
    # counted on the actions
    peak_in_flight: Formula | None = None
    # of these, most that wait between I and W; None likewise
    peak_waiting: Formula | None = None
    # share of 1F1B's bubble that is left where F = I = W, with one virtual stage per rank unless a V fixes two; the
    # planner's closed form
    idle: float = 1.0
    # forwards directly before backwards of the rank's other position may be played together (schedule/actions.py)
    pairs: bool = False
    # length of a B beside an F of 1, to which the order of communication is made; 1: neighbours' pairs of both keep
    # step
    beat: float = 2.0
    # of (stages, microbatches): share of a step's backwards that are split; None: all where any is
    split_share: Callable[[Number, Number], Number] | None = None


_RULES: dict[str, ScheduleRule] = {}
_FAMILIES: dict[str, Callable[[str], ScheduleRule | None]] = {}


def register_family(name: str, parse: Callable[[str], ScheduleRule | None]) -> None:
    """Make `parallel.schedule: name:parameters` mean the rule that `parse` makes of the parameters; None: they are
    none.
    """
    _FAMILIES[name] = parse


def register(name: str, rule: ScheduleRule) -> None:
    """Make `parallel.schedule: name` mean this rule."""
    _RULES[name] = rule
    build.cache_clear()


def names() -> list[str]:
    """All that are registered."""
    return list(_RULES)


def rule(name: str) -> ScheduleRule:
    """What was registered. Raises LayoutError with the nearest name."""
    known = _rule(name)
    if known is None:
        raise LayoutError([_unknown(name)])
    return known


def _rule(name: str) -> ScheduleRule | None:
    family, _, parameters = name.partition(":")
    return _FAMILIES[family](parameters) if family in _FAMILIES else _RULES.get(name)


def problems(name: str, chunks: int) -> list[Problem]:
    """Why these settings name no schedule; empty when they do."""
    known = _rule(name)
    if known is None:
        return [_unknown(name)]
    allowed = known.chunks
    if chunks in allowed:
        return []
    others = [other for other, rule in _RULES.items() if chunks in rule.chunks]
    fix = f"set parallel.chunks={' or '.join(map(str, nearest(chunks, allowed)))}"
    if others:
        fix += f", or parallel.schedule={' or '.join(others)}"
    return [Problem(where="parallel.chunks", what=f"{name} does not take {chunks} virtual stages per rank", fix=fix)]


def _unknown(name: str) -> Problem:
    return Problem(where="parallel.schedule", what=f"{name!r} is not a schedule", fix=suggest(name, _RULES))


@lru_cache(maxsize=32)
def build(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    messages: bool = True,
    pairs: bool = False,
) -> Schedule:
    """The schedule `name` for `stages` pipeline ranks, `microbatches` per step and replica, `chunks` virtual stages per
    rank.

    Any count of microbatches >= 1 is legal for every schedule of the package. Raises LayoutError for an unknown name, a
    size below 1, or chunks that the schedule does not take. Without `messages` it can be simulated, but not played.
    With `pairs` those of a schedule that has some are played as one.
    """
    wrong = [
        Problem(where=f"schedule {what}", what=f"{size} is below 1", fix="use 1 or more")
        for what, size in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks))
        if size < 1
    ]
    if _rule(name) is None or chunks >= 1:
        wrong += problems(name, chunks)
    if wrong:
        raise LayoutError(wrong)
    chosen = rule(name)
    placement = chosen.placement(stages, chunks)
    orders = [chosen.order(placement, microbatches, rank) for rank in range(stages)]
    pairs = pairs and chosen.pairs
    actions = with_messages(placement, orders, chosen.beat, pairs) if messages else tuple(map(tuple, orders))
    return Schedule(name, placement, microbatches, actions, pairs)


def forward_only(schedule: Schedule) -> Schedule:
    """The same pipeline without gradients, for evaluation: each stage's forwards in the order in which it trains.

    (All microbatches through chunk 0, then all through chunk 1, would leave the last stage with every message of the
    wrap-around undelivered, and with bounded sends in a deadlock.)
    """
    orders = [[action for action in actions if action.kind is Kind.FORWARD] for actions in schedule.compute]
    return Schedule(FORWARD_ONLY, schedule.placement, schedule.microbatches, with_messages(schedule.placement, orders))


def one_end(name: str) -> bool:
    """Whether one rank of a pipeline holds both the embedding and the head."""
    return len(rule(name).placement(2, rule(name).chunks[0]).ends) == 1


def idle_share(name: str, chunks: Number) -> Number:
    """Share of 1F1B's bubble that is left: virtual stages dealt out in turn divide it, those of a V do not."""
    return rule(name).idle / (1 if one_end(name) else chunks)


def split_share(name: str, stages: Number, microbatches: Number) -> Number:
    """Share of a step's backwards that are I and W instead of B."""
    some = rule(name).split_share
    if some is None:
        return float(rule(name).splits_backward) + 0 * microbatches
    return some(stages, microbatches)


def peak_in_flight(name: str, stages: Number, chunks: Number, microbatches: Number, stage: Number) -> Number:
    """Most virtual-stage activations that a stage keeps at once; where the schedule declares no formula, all of a
    step.
    """
    formula = rule(name).peak_in_flight
    if formula is None:
        return microbatches * chunks
    return formula(stages, microbatches, chunks, stage)


def peak_waiting(name: str, stages: Number, chunks: Number, microbatches: Number, stage: Number) -> Number:
    """Of these, most whose input gradient is done and whose weight gradients are not (split backward)."""
    if not rule(name).splits_backward:
        return 0 * microbatches
    formula = rule(name).peak_waiting
    if formula is None:
        return microbatches * chunks
    return formula(stages, microbatches, chunks, stage)
