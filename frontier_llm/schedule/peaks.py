"""Highest number of activations that a rank keeps, by a schedule's formula or counted on its list of actions.

The formulas make the search for layouts fast. `plan gpt-1t --machine frontier --nodes 384` takes 1.9 s of CPU time with
them. If all peaks are counted, it takes 15 s and chooses the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from frontier_llm.schedule.actions import Action, Kind, Placement
from frontier_llm.schedule.registry import Formula, Number, ScheduleRule, build, rule

# Peaks are counted with at most this number of microbatches per stage, if more microbatches do not change them.
STEADY_ROUNDS = 4

Order = Callable[[Placement, int, int], list[Action]]  # type of `ScheduleRule.order`
Place = Callable[[int, int], Placement]
# For each rank: the peak number of kept activations, and the peak numbers of activations that wait for their W at the
# end of a forward and of an input gradient.
Peaks = tuple[tuple[int, int, int], ...]


def peak_in_flight(name: str, stages: Number, chunks: Number, microbatches: Number, stage: Number) -> Number:
    """Return the highest number of virtual-stage activations that a stage keeps at the same time.

    If the schedule's rule has no formula, the number is counted on the list of actions.
    """
    return _peak(rule(name).peak_in_flight, 0, name, stages, chunks, microbatches, stage)


def peak_waiting(name: str, stages: Number, chunks: Number, microbatches: Number, stage: Number) -> Number:
    """Return the highest number of activations that wait for their weight gradient at the end of a forward.

    It is 0 for schedules without a split backward. Without a formula it is counted on the list of actions.
    """
    if not rule(name).splits_backward:
        return 0 * microbatches
    return _peak(rule(name).peak_waiting, 1, name, stages, chunks, microbatches, stage)


def peak_waiting_in_backward(name: str, stages: Number, chunks: Number, microbatches: Number, stage: Number) -> Number:
    """Return the highest number of activations that wait for their weight gradient at the end of an input gradient.

    A formula may return an upper bound. Otherwise the function is like `peak_waiting`.
    """
    if not rule(name).splits_backward:
        return 0 * microbatches
    return _peak(rule(name).peak_waiting_in_backward, 2, name, stages, chunks, microbatches, stage)


def peak_bytes(
    name: str, stages: int, chunks: int, microbatches: int, kept: Sequence[float], waiting: Sequence[float]
) -> list[float]:
    """Return the highest number of bytes that each rank keeps for activations, summed on the list of actions.

    `kept` and `waiting` have the bytes of one microbatch by position: from F to B or I, and from I to W.
    """
    steady = STEADY_ROUNDS * stages
    ranks = np.arange(stages)
    more, fewer = (peak_in_flight(name, stages, chunks, number, ranks) for number in (microbatches, steady))
    if microbatches > steady and np.array_equal(more, fewer):
        microbatches = steady  # further microbatches repeat the same states
    added = {}
    for position, (kept_bytes, waiting_bytes) in enumerate(zip(kept, waiting, strict=True)):
        added[Kind.FORWARD, position] = kept_bytes
        added[Kind.BACKWARD, position] = -kept_bytes
        added[Kind.BACKWARD_INPUT, position] = waiting_bytes - kept_bytes
        added[Kind.BACKWARD_WEIGHT, position] = -waiting_bytes
    actions = build(name, stages, microbatches, chunks, messages=False).compute
    return [max(accumulate(added[action.kind, action.position] for action in order)) for order in actions]


def _peak(
    formula: Formula | None,
    kind: int,
    name: str,
    stages: Number,
    chunks: Number,
    microbatches: Number,
    stage: Number,
) -> Number:
    if formula is not None:
        return formula(stages, microbatches, chunks, stage)
    columns = np.broadcast_arrays(stages, chunks, microbatches, stage)
    keys, places = np.unique(np.stack([column.ravel() for column in columns]), axis=1, return_inverse=True)
    peaks = []
    for p, v, m, rank in keys.T.astype(int).tolist():
        peaks.append(counted_peaks(rule(name), p, v, m)[rank][kind])
    found = np.array(peaks)[places].reshape(columns[0].shape)
    return found if found.ndim else found.item()


def counted_peaks(schedule: ScheduleRule, stages: int, chunks: int, microbatches: int) -> Peaks:
    """Return the peaks of every rank, counted on the lists of actions.

    If a further round of microbatches does not change the peaks, the peaks of fewer microbatches are returned.
    """
    steady = STEADY_ROUNDS * stages + stages % 2
    if microbatches > steady + stages:
        peaks = _count(schedule.order, schedule.placement, stages, chunks, steady)
        if peaks == _count(schedule.order, schedule.placement, stages, chunks, steady + stages):
            return peaks
    return _count(schedule.order, schedule.placement, stages, chunks, microbatches)


@lru_cache(maxsize=1024)
def _count(order: Order, place: Place, stages: int, chunks: int, microbatches: int) -> Peaks:
    placement = place(stages, chunks)
    return tuple(_count_rank(order(placement, microbatches, rank)) for rank in range(stages))


def _count_rank(order: list[Action]) -> tuple[int, int, int]:
    """Return the peaks of one rank (`Peaks`).

    An activation is kept from its F to its B or W, and waits from its I to its W.
    """
    kept = 0
    waiting = 0
    most_kept = 0
    most_waiting = 0
    most_waiting_in_backward = 0
    for action in order:
        if action.kind is Kind.FORWARD:
            kept += 1
            most_kept = max(most_kept, kept)
            most_waiting = max(most_waiting, waiting)
        elif action.kind is Kind.BACKWARD:
            kept -= 1
        elif action.kind is Kind.BACKWARD_INPUT:
            waiting += 1
            most_waiting_in_backward = max(most_waiting_in_backward, waiting)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            kept -= 1
            waiting -= 1
    return most_kept, most_waiting, most_waiting_in_backward
