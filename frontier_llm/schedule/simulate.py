"""The list of actions played against a clock: exact for given durations, so closed forms can be checked and plans compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from frontier_llm.schedule.actions import Action, Kind, Placement, Schedule

Duration = Callable[[int, Action], float]
Transfer = float | Callable[[int, int], float]
Times = tuple[list[float], ...]


@dataclass(frozen=True)
class Timeline:
    """When each compute action runs. `start_s[stage][n]` belongs to the n-th compute action of that stage."""

    schedule: Schedule
    start_s: Times
    end_s: Times

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return max(ends[-1] for ends in self.end_s)

    def busy_s(self, stage: int) -> float:
        """Seconds that a stage computes."""
        return sum(self.end_s[stage]) - sum(self.start_s[stage])

    @property
    def bubble_fraction(self) -> float:
        """Idle time over compute time, all stages together; (pp - 1) / m for 1F1B with equal stages (SC21, section 2.2)."""
        busy_s = sum(self.busy_s(stage) for stage in range(self.schedule.stages))
        return self.schedule.stages * self.makespan_s / busy_s - 1

    def spans(self, stage: int) -> Iterator[tuple[Action, float, float]]:
        """(action, start, end) of every compute action of a stage."""
        return zip(self.schedule.compute[stage], self.start_s[stage], self.end_s[stage], strict=True)


def simulate(schedule: Schedule, duration: Duration, send_s: Transfer = 0.0) -> Timeline:
    """Play the schedule. `duration(stage, action)` gives the seconds of a compute action.

    `send_s` is the seconds of one transfer, or a function of (source stage, target stage). Communication takes no time on the rank; a
    message leaves when the action that makes it ends, one at a time per directed stream.
    The schedule must be legal (see `check`). One step of 1600 microbatches on 64 stages takes less than a second.
    """
    return Timeline(schedule, *play(schedule.placement, schedule.compute, duration, send_s))


def simulate_in_turn(schedule: Schedule, duration: Duration, send_s: Transfer, waits: bool) -> Timeline:
    """Play the schedule with one communication in flight on each rank (comm.in_flight: one), in the one order of its `actions`.

    A message begins when both its ranks have ended what stands before it, compute and messages. With `waits` what stands behind it begins when it
    has ended: where the host waits for each call, or where compute has collectives inside, which take their turn. Otherwise compute waits
    only for what it needs. The schedule needs its messages.
    """
    return Timeline(schedule, *_Turns(schedule, duration, send_s, waits).play())


class _Turns:
    """State of such a simulation: per rank one clock of its compute, one of its communication, and a place in the list."""

    def __init__(self, schedule: Schedule, duration: Duration, send_s: Transfer, waits: bool) -> None:
        self.schedule, self.duration, self.waits = schedule, duration, waits
        self.seconds = send_s if callable(send_s) else lambda source, target: send_s
        self.compute_s, self.turn_s, self.place = [0.0] * schedule.stages, [0.0] * schedule.stages, [0] * schedule.stages
        self.ready: dict[Action, tuple[int, float]] = {}  # a message by its send → the end that is there, and since when
        self.ended: dict[Action, float] = {}
        self.start_s: Times = tuple([] for _ in schedule.actions)
        self.end_s: Times = tuple([] for _ in schedule.actions)

    def play(self) -> tuple[Times, Times]:
        """All ranks, each as far as it gets, until none is left."""
        runnable = set(range(self.schedule.stages))
        while runnable:
            rank = runnable.pop()
            actions = self.schedule.actions[rank]
            while self.place[rank] < len(actions):
                action = actions[self.place[rank]]
                if action.kind.computes:
                    self._compute(rank, action)
                elif not self._message(rank, action, runnable):
                    break
                self.place[rank] += 1
        return self.start_s, self.end_s

    def _compute(self, rank: int, action: Action) -> None:
        placement = self.schedule.placement
        start_s: float = max(self.compute_s[rank], self.turn_s[rank] if self.waits else 0)
        if receive := placement.received_by(action.kind, action.position):
            start_s = max(start_s, self.ended[_sent(placement, Action(receive, action.microbatch, action.position))])
        self.compute_s[rank] = end_s = start_s + self.duration(rank, action)
        self.start_s[rank].append(start_s)
        self.end_s[rank].append(end_s)

    def _message(self, rank: int, action: Action, runnable: set[int]) -> bool:
        """False while the other end is not there."""
        message = _sent(self.schedule.placement, action)
        if message not in self.ended:
            now_s = max(self.compute_s[rank], self.turn_s[rank])
            peer, since_s = self.ready.setdefault(message, (rank, now_s))
            if peer == rank:
                return False
            source, target = (rank, peer) if action.kind.sends else (peer, rank)
            self.ended[message] = max(now_s, since_s) + self.seconds(source, target)
            runnable.add(peer)
        self.turn_s[rank] = self.ended[message]
        return True


def _sent(placement: Placement, action: Action) -> Action:
    """The send of a message, by either of its ends."""
    if action.kind.sends:
        return action
    kind = Kind.SEND_FORWARD if action.kind is Kind.RECV_FORWARD else Kind.SEND_BACKWARD
    return Action(kind, action.microbatch, placement.other_end(action.kind, action.position))


def play(placement: Placement, orders: Sequence[Sequence[Action]], duration: Duration, send_s: Transfer = 0.0) -> tuple[Times, Times]:
    """(starts, ends) of the compute actions in `orders`, by rank; the lists end early where ranks wait for each other in a circle."""
    return _Player(placement, orders, duration, send_s).play()


class _Stream:
    """Messages of one kind from one rank to another: they leave one after the other."""

    def __init__(self, target: int, send_s: float) -> None:
        self.target, self.send_s, self.free_s = target, send_s, 0.0


class _Wire(NamedTuple):
    """Where the compute actions of one kind and position find and leave their data; arrivals by microbatch."""

    arrivals_s: dict[int, float] | None  # None: waits for nothing
    handed_s: dict[int, float]  # the neighbour's arrivals
    stream: _Stream | None  # None: the neighbour is on the same rank, or there is none


class _Player:
    """State of a simulation: one clock and one place in the list per rank."""

    def __init__(self, placement: Placement, orders: Sequence[Sequence[Action]], duration: Duration, send_s: Transfer) -> None:
        self.orders, self.duration = orders, duration
        seconds = send_s if callable(send_s) else lambda source, target: send_s
        forward: list[dict[int, float]] = [{} for _ in placement.rank_of]
        backward: list[dict[int, float]] = [{} for _ in placement.rank_of]
        streams: dict[tuple[Kind, int, int], _Stream] = {}
        self.wires = {}
        for kind, (position, rank) in product(Kind, enumerate(placement.rank_of)):
            if not kind.computes or kind is Kind.BACKWARD_WEIGHT:
                self.wires[kind, position] = _Wire(None, {}, None)
                continue
            arrivals, step = (forward, 1) if kind is Kind.FORWARD else (backward, -1)
            stream, message = None, placement.sent_by(kind, position)
            if message:
                peer = placement.peer(message, position)
                stream = streams.setdefault((message, rank, peer), _Stream(peer, seconds(rank, peer)))
            waits, hands = (0 <= other <= placement.last for other in (position - step, position + step))
            self.wires[kind, position] = _Wire(arrivals[position] if waits else None, arrivals[position + step] if hands else {}, stream)
        self.place, self.clock_s = [0] * placement.ranks, [0.0] * placement.ranks
        self.start_s: Times = tuple([] for _ in orders)
        self.end_s: Times = tuple([] for _ in orders)

    def play(self) -> tuple[Times, Times]:
        """All ranks, each as far as it gets, until none is left."""
        runnable = set(range(len(self.orders)))
        while runnable:
            self._advance(runnable.pop(), runnable)
        return self.start_s, self.end_s

    def _advance(self, rank: int, runnable: set[int]) -> None:
        """Play one rank until it waits for what was not made yet; note which ranks its messages make runnable."""
        actions, clock_s, duration, wires = self.orders[rank], self.clock_s[rank], self.duration, self.wires
        starts_s, ends_s, place = self.start_s[rank], self.end_s[rank], self.place[rank]
        while place < len(actions):
            action = actions[place]
            microbatch = action.microbatch
            arrivals_s, handed_s, stream = wires[action.kind, action.position]
            if arrivals_s is not None:
                arrival_s = arrivals_s.get(microbatch)
                if arrival_s is None:
                    break
                if arrival_s > clock_s:
                    clock_s = arrival_s
            starts_s.append(clock_s)
            clock_s += duration(rank, action)
            ends_s.append(clock_s)
            if stream is not None:
                stream.free_s = max(clock_s, stream.free_s) + stream.send_s
                handed_s[microbatch] = stream.free_s
                runnable.add(stream.target)
            else:
                handed_s[microbatch] = clock_s
            place += 1
        self.place[rank], self.clock_s[rank] = place, clock_s
