"""The one order of communication. Every message and every collective is one event that its ranks share, and all ranks play restrictions
of one topological order of these events. So the earliest unfinished event stands at the head of each participant's queue, and no circular
wait exists, however few communications a rank may have in flight: one is enough.

The order comes from the schedule played with actions of equal length: a message stands where its producer ends, a compute action and the
collectives inside it where it starts. Ranks then wait little for each other: with a single communication in flight, and host and compute
waiting for it, 1F1B loses 1 % and ZB-H1 2 % where a message takes 2 % of a forward. (Each message directly behind its producer's *start*,
or compute at its *end*, is as safe and loses 10 to 200 %.)
Collectives are kept per kind of action and position; only `steps` writes them out, for the checker.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from frontier_llm.errors import FrontierError, Problem
from frontier_llm.schedule.actions import Action, Kind, Placement, Schedule
from frontier_llm.schedule.simulate import play

_LENGTH = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
_ARRIVES = {Kind.SEND_FORWARD: Kind.RECV_FORWARD, Kind.SEND_BACKWARD: Kind.RECV_BACKWARD}


class ScheduleError(FrontierError):
    """A schedule that cannot be played, or that would compute the wrong thing."""


def with_messages(placement: Placement, orders: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Each rank's restriction of the order: its compute actions, and its side of every message.

    Raises ScheduleError when the ranks' orders of compute wait for each other in a circle.
    """
    starts, ends = play(placement, orders, lambda rank, action: _LENGTH[action.kind])
    stuck = [(rank, orders[rank][len(times)]) for rank, times in enumerate(ends) if len(times) < len(orders[rank])]
    if stuck:
        raise ScheduleError([Problem(f"stage {rank}", f"deadlock: {action} waits for its neighbour") for rank, action in stuck])
    routes = {(kind, position): _route(placement, kind, position) for kind in _LENGTH for position in range(len(placement.rank_of))}
    messages = sorted(
        (end, rank, action, route)
        for rank, order in enumerate(orders)
        for end, action in zip(ends[rank], order, strict=True)
        if (route := routes[action.kind, action.position])
    )
    played: list[list[Action]] = [[] for _ in orders]
    begun = [0] * len(orders)
    for times in starts:
        times.append(inf)
    for moment, rank, action, (send, receive, position, peer) in messages:
        microbatch = action.microbatch
        for end, message in (rank, Action(send, microbatch, action.position)), (peer, Action(receive, microbatch, position)):
            first = place = begun[end]
            times = starts[end]
            while times[place] < moment:  # behind what the rank has begun by then
                place += 1
            if place > first:
                played[end] += orders[end][first:place]
                begun[end] = place
            played[end].append(message)
    return tuple((*actions, *order[done:]) for actions, order, done in zip(played, orders, begun, strict=True))


def _route(placement: Placement, kind: Kind, position: int) -> tuple[Kind, Kind, int, int] | None:
    """(send, receive, position and rank that receive) of the message that a compute action makes."""
    send = placement.sent_by(kind, position)
    return send and (send, _ARRIVES[send], placement.other_end(send, position), placement.peer(send, position))


def posted_ahead(actions: Sequence[Action]) -> list[Action]:
    """The same messages in the same sequence, each receive one compute action early, so that it is open when the message comes.

    For runtimes with many communications in flight: nothing waits behind a posted receive there.
    """
    ahead: list[Action] = []
    place = 0  # where the next receive goes: before the compute action that it stands behind
    for action in actions:
        if action.kind in _ARRIVES.values():
            ahead.insert(place, action)
            place += 1
        else:
            place = len(ahead) + (not action.kind.computes)
            ahead.append(action)
    return ahead


# ------------------------------------------------------------------------------------------------------- collectives

Call = tuple[str, str]  # (axis or channel, operation), as the ledger has them


@dataclass(frozen=True)
class Collectives:
    """What a step communicates beside the messages, in order; whoever knows the layers says it."""

    inside: Mapping[tuple[Kind, int], Sequence[Call]] = field(default_factory=dict)  # of each action of a kind at a position
    instead: Mapping[Action, Sequence[Call]] = field(default_factory=dict)  # of single actions: last backwards, where dp sums start
    before: Sequence[Call] = ()  # the first action
    behind: Mapping[int, Sequence[Call]] = field(default_factory=dict)  # the last action, by pipeline rank: tied sums, late dp sums, world

    def of(self, action: Action) -> Sequence[Call]:
        """Inside one compute action."""
        return self.instead.get(action) or self.inside.get((action.kind, action.position), ())


def calls(schedule: Schedule, rank: int, collectives: Collectives) -> Iterator[Call]:
    """What a pipeline rank's ledger has after a step, entry by entry."""
    yield from collectives.before
    for action in schedule.actions[rank]:
        if action.kind.computes:
            yield from collectives.of(action)
        else:
            operation = "send" if action.kind.sends else "recv"
            yield f"pp.{schedule.placement.channel(action.kind, action.position).value}", operation
    yield from collectives.behind.get(rank, ())


# ----------------------------------------------------------------------------------------------------------- checker


class Step(NamedTuple):
    """One entry of a rank's list, written out: a communication, or (with no ranks) the compute that waits for some of them."""

    what: str  # the same on all ranks that share the event
    stream: str = ""  # communications of a stream meet in the order in which they are issued
    ranks: tuple[int, ...] = ()
    after: tuple[int, ...] = ()  # places in the same list that must have ended


def steps(schedule: Schedule, collectives: Collectives | None = None, tp: int = 1, dp: int = 1) -> list[list[Step]]:
    """Every rank's list on a mesh of pp x dp x tp ranks, tp innermost."""
    collectives, placement = collectives or Collectives(), schedule.placement

    def members(axis: str, stage: int, d: int, t: int) -> tuple[int, ...]:
        if axis == "world":
            return tuple(range(schedule.stages * dp * tp))
        stages = placement.ends if axis == "tied" else (stage,)
        ds, ts = range(dp) if axis == "dp" else (d,), range(tp) if axis == "tp" else (t,)
        return tuple((s * dp + a) * tp + b for s in stages for a in ds for b in ts)

    def written_out(stage: int, d: int, t: int) -> list[Step]:
        steps: list[Step] = []
        place: dict[tuple[Kind, int, int], int] = {}

        def collective(call: Call, where: str) -> None:
            ranks = members(call[0], stage, d, t)
            if len(ranks) > 1:
                steps.append(Step(f"{call[0]} {call[1]} {where}", call[0], ranks))

        for call in collectives.before:
            collective(call, "before the first action")
        for action in schedule.actions[stage]:
            kind, microbatch, position = action.kind, action.microbatch, action.position
            if not kind.computes:
                peer = placement.peer(kind, position)
                sender = position if kind.sends else placement.other_end(kind, position)
                ends = tuple((rank * dp + d) * tp + t for rank in ((stage, peer) if kind.sends else (peer, stage)))
                place[kind, microbatch, position] = len(steps)
                steps.append(Step(f"{kind.value[1]}{microbatch}@{sender}'s message", placement.channel(kind, position).value, ends))
                continue
            receive = placement.received_by(kind, position)
            steps.append(Step(str(action), after=(place[receive, microbatch, position],) if receive else ()))
            first = len(steps)
            for call in collectives.of(action):
                collective(call, f"in {action}")
            waited = tuple(index for index in range(first, len(steps)) if steps[index].stream == "tp")
            steps.append(Step(str(action), after=waited))
        for call in collectives.behind.get(stage, ()):
            collective(call, "behind the last action")
        return steps

    return [written_out(stage, d, t) for stage in range(schedule.stages) for d in range(dp) for t in range(tp)]


def check_order(lists: Sequence[Sequence[Step]], in_flight: int | None = 1) -> None:
    """Raise ScheduleError, naming what each rank waits for, unless the lists end with so many communications in flight per rank.

    Rendezvous without buffering: an event ends when it is the first unfinished one of its stream on all its ranks. A rank that has
    `in_flight` unfinished ones (None: no bound) goes no further.
    """
    _Ranks(lists, in_flight).play()


class _Ranks:
    """Every rank's list played without time: where each stands, and what it has issued and not ended."""

    def __init__(self, lists: Sequence[Sequence[Step]], in_flight: int | None) -> None:
        self.lists, self.in_flight = lists, in_flight
        self.place = [0] * len(lists)
        self.ended: list[set[int]] = [set() for _ in lists]
        self.open: list[dict[str, deque[int]]] = [defaultdict(deque) for _ in lists]

    def play(self) -> None:
        runnable = set(range(len(self.lists)))
        while runnable:
            rank = runnable.pop()
            runnable |= self.advance(rank)
        stuck = {
            rank: self.obstacle(rank) for rank in range(len(self.lists)) if self.place[rank] < len(self.lists[rank]) or self.issued(rank)
        }
        if stuck:
            raise ScheduleError([Problem(f"rank {rank}", f"deadlock: waits for {what}") for rank, what in stuck.items()])

    def issued(self, rank: int) -> int:
        """Communications in flight."""
        return sum(map(len, self.open[rank].values()))

    def obstacle(self, rank: int) -> str:
        """What a stuck rank waits for."""
        first = min((queue[0] for queue in self.open[rank].values() if queue), default=self.place[rank])
        return self.lists[rank][first].what

    def advance(self, rank: int) -> set[int]:
        """Play one rank until it waits; returns the ranks that this may have freed."""
        freed: set[int] = set()
        listed = self.lists[rank]
        while self.place[rank] < len(listed):
            step = listed[self.place[rank]]
            if not self.ended[rank].issuperset(step.after) or (step.ranks and self.issued(rank) == self.in_flight):
                break
            if step.ranks:
                self.open[rank][step.stream].append(self.place[rank])
                freed |= self.end(rank, step.stream)
            self.place[rank] += 1
        return freed

    def end(self, rank: int, stream: str) -> set[int]:
        """End what stands first on its stream on all its ranks, and what that lets through."""
        freed: set[int] = set()
        ranks = [rank]
        while ranks:
            rank = ranks.pop()
            if not self.open[rank][stream]:
                continue
            event = self.lists[rank][self.open[rank][stream][0]]
            heads = [(other, self.open[other][stream][0]) for other in event.ranks if self.open[other][stream]]
            same = [(other, head) for other, head in heads if self.lists[other][head].ranks == event.ranks]
            if len(same) < len(event.ranks):
                continue
            for other, head in same:
                if self.lists[other][head].what != event.what:
                    there = self.lists[other][head].what
                    raise ScheduleError(f"rank {rank} has {event.what} where rank {other} has {there} on the {stream} channel")
            for other, head in same:
                self.open[other][stream].popleft()
                self.ended[other].add(head)
            freed |= set(event.ranks)
            ranks += event.ranks
        return freed
