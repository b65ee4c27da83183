"""Zero-bubble schedules, whose delayed weight gradients fill idle time: interleaved 1F1B, and V-shaped schedules.

In a V of p ranks, rank r holds the virtual stages at positions r and 2p - 1 - r. The first rank holds embedding and
head. The last rank holds two consecutive positions, which exchange no message. The activations of a rank's two
positions add up to about the same number on all ranks.

The order of a V repeats one *block* per microbatch. On a rank, a block has six units of time: two forwards F, two input
gradients I and two weight gradients W. The time between the passes of neighbouring positions is called distance. It
determines how long an activation is kept, and therefore the memory. If the distances of F and I have the sum s, the
schedule keeps s/6 of the activations of 1F1B.

Source: Qi et al. 2024 ("Pipeline Parallelism with Controllable Memory": V-Min, V-Half, ZB-V). The orders assume that F,
I and W take equal time. They do not depend on the real durations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from frontier_llm.schedule.actions import Action, Kind, Placement
from frontier_llm.schedule.registry import Formula, Number, ScheduleRule, register, register_family
from frontier_llm.schedule.standard import MOST_CHUNKS, interleaved, peak_interleaved

Order = list[Action]
PERIOD = 6  # number of time units that a microbatch takes on a rank, which has two positions
_UNITS = range(1, PERIOD + 1)
# Candidates for the time units between consecutive passes on the same rank: (turn of F on the last rank, loss on the
# first rank, turn of I on the last rank).
GAPS = list(product(_UNITS, _UNITS, _UNITS))


def v_shape(stages: int, chunks: int) -> Placement:
    """Return the placement of a V: positions go from the first rank to the last and back. `chunks` must be 2."""
    assert chunks == 2
    return Placement((*range(stages), *reversed(range(stages))))


@dataclass(frozen=True)
class Pattern:
    """Time unit of each position's three passes for microbatch 0. Microbatch i runs PERIOD · i units later."""

    forward: tuple[int, ...]  # time of the forward, by position
    backward: tuple[int, ...]  # time of the input gradient, by position
    weight: tuple[int, ...]  # time of the weight gradient, by position

    @cached_property
    def lifetimes(self) -> tuple[int, ...]:
        """Units from the beginning of F to the end of W, by position."""
        return tuple(end + 1 - begin for begin, end in zip(self.forward, self.weight, strict=True))

    def alive(self, stages: int, microbatches: int, rank: int) -> tuple[int, int]:
        """Return the peak numbers of kept activations and of activations that wait for their W, on one rank.

        Both are maxima over the ends of the rank's forwards.
        """
        held = rank, 2 * stages - 1 - rank
        indices = np.arange(microbatches)
        moments = np.concatenate([self.forward[position] + PERIOD * indices for position in held])
        counts = np.zeros((2, len(moments)), dtype=int)
        for position in held:
            begun, moved, ended = (
                np.clip((moments - first) // PERIOD + 1, 0, microbatches)
                for first in (self.forward[position], self.backward[position], self.weight[position])
            )
            counts += begun - ended, moved - ended
        return int(counts[0].max()), int(counts[1].max())


# Time units between the passes of neighbouring positions: F down, F up, I down, I up. "Down" is the direction from the
# first to the last rank.
Distances = tuple[int, int, int, int]


@lru_cache(maxsize=1024)
def pattern_of(stages: int, choices: tuple[Distances, ...]) -> Pattern:
    """Return the block of the distances in `choices` with which activations are kept for the shortest time.

    The gaps at the ends of the V are chosen so that no two passes of a rank use the same unit of the period.
    """
    every = product(choices, GAPS)
    found = (candidate for distances, gaps in every if (candidate := _with_gaps(stages, distances, gaps)))
    return min(
        found,
        key=lambda one: (
            max(one.lifetimes[rank] + one.lifetimes[-1 - rank] for rank in range(stages)),
            one.backward[0],
        ),
    )


def _with_gaps(stages: int, distances: Distances, gaps: tuple[int, int, int]) -> Pattern | None:
    """Return the block with these gaps: where F turns at the last rank, at the loss, and where I turns at the last
    rank.

    None if two passes of a rank use the same unit.
    """
    ways = [[distance] * (stages - 1) for distance in distances]
    steps = [*ways[0], gaps[0], *ways[1], gaps[1], *ways[2], gaps[2], *ways[3]]
    moments = np.cumsum([0, *steps]).tolist()
    forward = moments[: 2 * stages]
    backward = moments[: 2 * stages - 1 : -1]
    weight = [0] * (2 * stages)
    for rank in range(stages):
        held = rank, 2 * stages - 1 - rank
        taken = {moment % PERIOD for position in held for moment in (forward[position], backward[position])}
        if len(taken) < 4:
            return None
        for position in reversed(held):
            moment = backward[position] + 1
            while moment % PERIOD in taken:
                moment += 1
            taken.add(moment % PERIOD)
            weight[position] = moment
    return Pattern(tuple(forward), tuple(backward), tuple(weight))


@dataclass(frozen=True)
class VOrder:
    """Order of a V-shaped schedule with the best of the given distances. Its methods are fields of a `ScheduleRule`."""

    choices: tuple[Distances, ...]

    def __call__(self, placement: Placement, microbatches: int, rank: int) -> Order:
        """Return the rank's compute actions (`ScheduleRule.order`)."""
        return list(_v_orders(self, placement, microbatches)[rank])

    def peak_in_flight(self, stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
        """Return the peak number of activations of the block, for `ScheduleRule.peak_in_flight`.

        If there are at most as many microbatches as stages, the result is an upper bound, because `filled` then runs
        some weight gradients earlier.
        """
        return self._peaks(stages, microbatches, stage)[0]

    def peak_waiting(self, stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
        """Return the peak number of a block's activations that wait for their W, for `ScheduleRule.peak_waiting`."""
        return self._peaks(stages, microbatches, stage)[1]

    def _peaks(self, stages: Number, microbatches: Number, stage: Number) -> tuple[np.ndarray, ...]:
        """Return both peaks for arrays of layouts.

        More than 3p + 4 microbatches do not change the peaks. The thousands of layouts of a search have only some
        hundred different arguments, and each is computed once.
        """
        columns = np.broadcast_arrays(stages, np.minimum(microbatches, 3 * np.asarray(stages) + 4), stage)
        keys, places = np.unique(np.stack([column.ravel() for column in columns]), axis=1, return_inverse=True)
        counted = np.array([_alive(self, *map(int, key)) for key in keys.T])
        return tuple(column[places].reshape(columns[0].shape) for column in counted.T)


@lru_cache(maxsize=1 << 16)
def _alive(order: VOrder, stages: int, microbatches: int, rank: int) -> tuple[int, int]:
    return pattern_of(stages, order.choices).alive(stages, microbatches, rank)


@lru_cache(maxsize=8)
def _v_orders(order: VOrder, placement: Placement, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    one = pattern_of(placement.ranks, order.choices)
    listed = []
    for rank in range(placement.ranks):
        timed = []
        for position in placement.positions_of(rank):
            moments = {
                Kind.FORWARD: one.forward[position],
                Kind.BACKWARD_INPUT: one.backward[position],
                Kind.BACKWARD_WEIGHT: one.weight[position],
            }
            for (kind, moment), microbatch in product(moments.items(), range(microbatches)):
                timed.append((moment + PERIOD * microbatch, Action(kind, microbatch, position)))
        timed.sort(key=lambda pair: pair[0])
        listed.append([action for _, action in timed])
    return filled(placement, listed)


def filled(placement: Placement, orders: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Return the orders of all ranks, with weight gradients moved to units of time in which the rank would be idle.

    The orders are simulated in units of time. Until a rank's last forward, a weight gradient runs at its place in the
    given order, or earlier if nothing else can run. After it, the number of kept activations cannot grow. Input
    gradients then run first, because other ranks wait for them.
    """
    ranks = [_Rank(order) for order in orders]
    # (True for a forward, microbatch, position) → time unit at which the pass has ended
    ended: dict[tuple[bool, int, int], int] = {}
    moment = 0
    left = sum(map(len, orders))
    while left:
        chosen = [(rank, action) for rank in ranks if (action := rank.next(placement, ended, moment))]
        assert chosen, "deadlock in the order of the actions"
        moment += 1
        for rank, action in chosen:
            rank.append(action)
            if action.kind is not Kind.BACKWARD_WEIGHT:
                ended[action.kind is Kind.FORWARD, action.microbatch, action.position] = moment
        left -= len(chosen)
    return tuple(tuple(rank.order) for rank in ranks)


class _Rank:
    """State of one rank in `filled`."""

    def __init__(self, order: Sequence[Action]) -> None:
        self.passes = deque(action for action in order if action.kind is not Kind.BACKWARD_WEIGHT)
        self.last_forward = sum(action.kind is Kind.FORWARD for action in order)
        self.order: Order = []
        self.waiting: dict[Action, None] = {}  # weight gradients that may run, in the order of their input gradients.
        # Action → the weight gradients that come directly before it in the order
        self.due: dict[Action, list[Action]] = {}
        late: list[Action] = []
        for action in order:
            if action.kind is Kind.BACKWARD_WEIGHT:
                late.append(action)
            elif late:
                self.due[action] = late
                late = []

    def next(self, placement: Placement, ended: dict[tuple[bool, int, int], int], moment: int) -> Action | None:
        """Return the action that runs at `moment`; None if the rank idles."""
        if self.passes:
            action = self.passes[0]
            if self.last_forward:
                for late in self.due.get(action, ()):
                    if late in self.waiting:
                        return late
            if self._ready(action, placement, ended, moment):
                return action
        return next(iter(self.waiting), None)

    def _ready(
        self,
        action: Action,
        placement: Placement,
        ended: dict[tuple[bool, int, int], int],
        moment: int,
    ) -> bool:
        forward = action.kind is Kind.FORWARD
        before = action.position + (-1 if forward else 1)
        if not forward and before > placement.last:
            before = action.position
            forward = True
        return before < 0 or ended.get((forward, action.microbatch, before), moment + 1) <= moment

    def append(self, action: Action) -> None:
        """Record that an action has run."""
        self.order.append(action)
        if action.kind is Kind.BACKWARD_WEIGHT:
            del self.waiting[action]
            return
        self.passes.popleft()
        if action.kind is Kind.FORWARD:
            self.last_forward -= 1
        else:
            self.waiting[Action(Kind.BACKWARD_WEIGHT, action.microbatch, action.position)] = None


def _interleaved_zero_bubble(placement: Placement, microbatches: int, rank: int) -> Order:
    """Return the order of interleaved 1F1B with a split backward.

    The first rank has the most activations in flight. On all other ranks W is delayed, so that these ranks have the
    same number of activations in flight.
    """
    return list(_interleaved_orders(placement, microbatches)[rank])


@lru_cache(maxsize=8)
def _interleaved_orders(placement: Placement, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    orders = []
    for rank in range(placement.ranks):
        order = list[Action]()
        backward = deque[Action]()
        for action in interleaved(placement, microbatches, rank):
            order.append(action if action.kind is Kind.FORWARD else action._replace(kind=Kind.BACKWARD_INPUT))
            if action.kind is Kind.BACKWARD:
                backward.append(action._replace(kind=Kind.BACKWARD_WEIGHT))
                if len(backward) > (2 if placement.chunks > 1 else 1) * rank:
                    order.append(backward.popleft())
        orders.append([*order, *backward])
    return filled(placement, orders)


def _peak_interleaved(stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
    return peak_interleaved(stages, microbatches, chunks, 0)


def _waiting_interleaved(stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
    return peak_interleaved(stages, microbatches, chunks, 0) - peak_interleaved(stages, microbatches, chunks, stage)


def _waiting_zb_v(stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
    """Return r + 2 for rank r: after the last forward, input gradients run first (`filled`)."""
    return np.minimum(2 * microbatches, stage + 2)


def _waiting_few(stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
    """Return the upper bound of V-Min and V-Half."""
    return np.minimum(2 * microbatches, 3)


ZB_V = VOrder(((4, 2, 4, 2),))
V_HALF = VOrder(((2, 1, 2, 1),))
V_MIN = VOrder(((1, 1, 1, 1),))


def _v_rule(order: VOrder, idle: float, about: str = "", waiting_in_backward: Formula | None = None) -> ScheduleRule:
    return ScheduleRule(
        order=order,
        placement=v_shape,
        chunks=(2,),
        splits_backward=True,
        peak_in_flight=order.peak_in_flight,
        peak_waiting=order.peak_waiting,
        peak_waiting_in_backward=waiting_in_backward,
        idle=idle,
        about=about,
    )


# Memory relative to 1F1B, in sixths → distances of V-shaped schedules. Each has a valid order for every number of
# stages.
DISTANCES: dict[int, tuple[Distances, ...]] = {
    2: ((1, 1, 1, 1),),
    3: ((2, 1, 2, 1), (1, 2, 1, 2)),
    4: ((2, 2, 2, 2), (1, 3, 1, 3), (3, 1, 3, 1)),
    6: (
        (4, 2, 4, 2),
        (3, 3, 3, 3),
        (2, 4, 2, 4),
        (1, 5, 1, 5),
        (5, 1, 5, 1),
        (2, 2, 4, 4),
        (4, 4, 2, 2),
        (1, 1, 5, 5),
        (5, 5, 1, 1),
        (1, 2, 4, 5),
        (1, 3, 3, 5),
        (2, 1, 5, 4),
        (3, 1, 5, 3),
        (3, 5, 1, 3),
        (4, 5, 1, 2),
        (5, 3, 3, 1),
        (5, 4, 2, 1),
    ),
}


def v_names() -> list[str]:
    """Return the names of all V schedules in `DISTANCES`, as `parallel.schedule` accepts them."""
    return ["v:" + ",".join(map(str, distances)) for members in DISTANCES.values() for distances in members]


@lru_cache(maxsize=1024)
def _of_distances(text: str) -> ScheduleRule | None:
    """Return the rule for distances such as '2,2,2,2'; None if they are not in `DISTANCES`."""
    for sixths, members in DISTANCES.items():
        for distances in members:
            if text == ",".join(map(str, distances)):
                return _v_rule(VOrder((distances,)), idle=1 - sixths / 6 if sixths < 6 else 1 / 6)
    return None


for name, order, idle, waiting_in_backward, about in (
    (
        "zb-v",
        ZB_V,
        1 / 6,
        _waiting_zb_v,
        "a V (rank r holds stages r and 2p - 1 - r): the least idle time with 1f1b's memory",
    ),
    ("v-half", V_HALF, 1 / 2, _waiting_few, "a V with half of 1f1b's activations"),
    ("v-min", V_MIN, 2 / 3, _waiting_few, "a V with a third of 1f1b's activations"),
):
    register(name, _v_rule(order, idle, about, waiting_in_backward))
register_family("v", _of_distances)
register(
    "interleaved-zb",
    ScheduleRule(
        order=_interleaved_zero_bubble,
        chunks=range(1, MOST_CHUNKS + 1),
        splits_backward=True,
        peak_in_flight=_peak_interleaved,
        peak_waiting=_waiting_interleaved,
        peak_waiting_in_backward=_peak_interleaved,  # exact on the last rank, an upper bound on the others
        idle=1 / 3,
        about="interleaved with a split backward: the smallest bubble at the most memory",
    ),
)
