"""Registry of schedules by name. A new schedule is one function and one call of `register`.

    def order(placement, microbatches, rank):          # the rank's compute actions, in order
        ...
    schedule.register("mine", schedule.ScheduleRule(order))

The package derives messages, channels, memory, simulation and figures from the order of compute and the placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from traceback import extract_tb
from typing import Any

from frontier_llm.errors import LayoutError, Problem, nearest, suggest
from frontier_llm.schedule.actions import FORWARD_ONLY, Action, Kind, Placement, Schedule, round_robin
from frontier_llm.schedule.order import with_messages

Number = Any  # int, or a numpy array with one int for each of many layouts
_COMPUTE_ACTIONS = "return a list of Action(kind, microbatch, position) with compute kinds (docs/extending.md)"
Formula = Callable[[Number, Number, Number, Number], Number]  # function of (stages, microbatches, chunks, stage)


@dataclass(frozen=True)
class ScheduleRule:
    """Definition of a schedule: its order of compute, its placement, and formulas for its memory and idle time."""

    order: Callable[[Placement, int, int], list[Action]]  # (placement, microbatches, rank) → the rank's compute actions
    placement: Callable[[int, int], Placement] = round_robin  # (stages, chunks) → placement of the virtual stages
    chunks: Sequence[int] = (1,)  # allowed numbers of virtual stages per rank
    splits_backward: bool = False  # True: all or some backwards are I and W instead of B.
    # Highest number of activations that a pipeline rank keeps, each of one microbatch and virtual stage, from F to B or
    # W. None: the number is counted on the list of actions (schedule/peaks.py).
    peak_in_flight: Formula | None = None
    # Highest number of these activations that wait between I and W at the end of a forward. None has the same meaning
    # as for peak_in_flight.
    peak_waiting: Formula | None = None
    # The same number at the end of an input gradient, or an upper bound. It is higher if the weight gradients are
    # delayed after the last forward.
    peak_waiting_in_backward: Formula | None = None
    # Bubble divided by the bubble of 1F1B if F, I and W take equal time, for the planner's formula. The value is for
    # one virtual stage per rank, or for two if the schedule is a V.
    idle: float = 1.0
    # A forward directly before a backward of the rank's other position may be executed as a pair (schedule/actions.py).
    pairs: bool = False
    # Length of a B, relative to an F, with which the order of communication is computed. With 1, neighbouring ranks
    # begin their pairs at the same time.
    backward_length: float = 2.0
    # (stages, microbatches) → share of a step's backwards that are split. None: all backwards if `splits_backward` is
    # set.
    split_share: Callable[[Number, Number], Number] | None = None
    about: str = ""  # one line for `frontier-llm list schedules`


_RULES: dict[str, ScheduleRule] = {}
_FAMILIES: dict[str, Callable[[str], ScheduleRule | None]] = {}


def register_family(name: str, parse: Callable[[str], ScheduleRule | None]) -> None:
    """Register a family of schedules with parameters, selected by `parallel.schedule: name:parameters`.

    `parse` makes a rule from the parameters. It returns None for invalid parameters.
    """
    _FAMILIES[name] = parse


def register(name: str, rule: ScheduleRule) -> None:
    """Register a schedule, selected by `parallel.schedule: name`."""
    _RULES[name] = rule
    build.cache_clear()


def names() -> list[str]:
    """Return the registered names, without families of schedules."""
    return list(_RULES)


def rule(name: str) -> ScheduleRule:
    """Return the rule of a schedule. Raises LayoutError with the closest name if it is unknown."""
    known = _rule(name)
    if known is None:
        raise LayoutError([_unknown(name)])
    return known


def _rule(name: str) -> ScheduleRule | None:
    family, _, parameters = name.partition(":")
    return _FAMILIES[family](parameters) if family in _FAMILIES else _RULES.get(name)


def problems(name: str, chunks: int) -> list[Problem]:
    """Return the problems of a schedule's name and number of chunks; empty if both are valid."""
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
    return [Problem(where="parallel.chunks", what=f"{name} does not support {chunks} virtual stages per rank", fix=fix)]


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
    """Build the schedule `name` for `stages` pipeline ranks.

    `microbatches` is the number per step and replica, `chunks` the number of virtual stages per rank. Every schedule of
    the package accepts any number of microbatches >= 1. Without `messages` the schedule can be simulated, but not
    executed. With `pairs`, the engine executes each pair of the schedule as one unit, if the schedule has pairs.

    Raises LayoutError for an unknown name, a size below 1, or a number of chunks that the schedule does not accept.
    Also raises LayoutError if a plugin's function for the order fails or returns something else than compute actions.
    Raises ScheduleError for a deadlock.
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
    orders = [_order_of(name, placement, microbatches, rank) for rank in range(stages)]
    pairs = pairs and chosen.pairs
    actions = with_messages(placement, orders, chosen.backward_length, pairs) if messages else tuple(map(tuple, orders))
    return Schedule(name, placement, microbatches, actions, pairs)


def _order_of(name: str, placement: Placement, microbatches: int, rank: int) -> list[Action]:
    """Return a rank's compute actions. Raises LayoutError if the rule's function fails or returns something else."""
    call = f"its order for rank {rank} of {placement.ranks} and {microbatches} microbatches"
    try:
        actions = rule(name).order(placement, microbatches, rank)
    except Exception as error:
        last = extract_tb(error.__traceback__)[-1]
        what = f"{call} raises {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        raise _wrong_order(name, what, "repair the plugin") from error
    if not isinstance(actions, Sequence) or not actions:
        raise _wrong_order(name, f"{call} is {actions!r}", _COMPUTE_ACTIONS)
    wrong = [action for action in actions if not isinstance(action, Action) or not action.kind.computes]
    if wrong:
        raise _wrong_order(name, f"{call} has {wrong[0]!r}", _COMPUTE_ACTIONS)
    return list(actions)


def _wrong_order(name: str, what: str, fix: str) -> LayoutError:
    return LayoutError(what, fix, f"parallel.schedule={name}")


def forward_only(schedule: Schedule) -> Schedule:
    """Return the schedule of an evaluation: the forwards of `schedule`, in their order, without backwards.

    If all microbatches first passed through chunk 0, the order could deadlock. The last stage may have only a limited
    number of sends in flight, and no rank would receive its messages to chunk 1 in time.
    """
    orders = [[action for action in actions if action.kind is Kind.FORWARD] for actions in schedule.compute]
    return Schedule(FORWARD_ONLY, schedule.placement, schedule.microbatches, with_messages(schedule.placement, orders))


def one_end(name: str) -> bool:
    """Return True if one rank of a pipeline holds both the embedding and the head."""
    return len(rule(name).placement(2, rule(name).chunks[0]).ends) == 1


def idle_share(name: str, chunks: Number) -> Number:
    """Return the bubble divided by the bubble of 1F1B. Except for a V, this ratio is inversely proportional to the
    number of chunks.
    """
    return rule(name).idle / (1 if one_end(name) else chunks)


def split_share(name: str, stages: Number, microbatches: Number) -> Number:
    """Return the fraction of a step's backwards that are split into I and W."""
    some = rule(name).split_share
    if some is None:
        return float(rule(name).splits_backward) + 0 * microbatches
    return some(stages, microbatches)
