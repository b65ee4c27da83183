"""Executes the lists of actions and collectives of all ranks without computing and without durations.

Shows whether an order of communication deadlocks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from frontier_llm.errors import Problem
from frontier_llm.schedule.actions import Action, Kind, Schedule
from frontier_llm.schedule.simulate import ScheduleError

Call = tuple[str, str]  # (axis or channel, operation), as in the ledger


@dataclass(frozen=True)
class CollectiveLists:
    """The collectives of a step (all communication except the pipeline's messages), in order.

    The caller gives the lists, because they depend on the layers.
    """

    # Collectives inside each action of a kind at a position.
    inside: Mapping[tuple[Kind, int], Sequence[Call]] = field(default_factory=dict)
    # Collectives of single actions, which replace the collectives in `inside`. Example: in the last backwards, dp sums
    # start.
    instead: Mapping[Action, Sequence[Call]] = field(default_factory=dict)
    before: Sequence[Call] = ()  # Collectives before the first action.
    # Collectives after the last action, by pipeline rank: sums of tied weights, last dp sums, collectives of all ranks.
    behind: Mapping[int, Sequence[Call]] = field(default_factory=dict)

    def of(self, action: Action) -> Sequence[Call]:
        """Return the collectives inside one compute action."""
        return self.instead.get(action) or self.inside.get((action.kind, action.position), ())


class ListEntry(NamedTuple):
    """One entry of the list that a rank executes: a communication, or (if `ranks` is empty) compute that waits for
    communications.
    """

    what: str  # text that is equal on all ranks of the communication
    stream: str = ""  # communications of a stream are matched in the order in which they are issued
    ranks: tuple[int, ...] = ()  # global ranks of the communication; () = compute
    after: tuple[int, ...] = ()  # indices of earlier entries that must have ended


def steps(
    schedule: Schedule, collectives: CollectiveLists | None = None, tp: int = 1, dp: int = 1
) -> list[list[ListEntry]]:
    """Return the list of steps of every rank, on a mesh of pp x dp x tp ranks with tp innermost."""
    collectives = collectives or CollectiveLists()
    placement = schedule.placement

    def members(axis: str, stage: int, d: int, t: int) -> tuple[int, ...]:
        if axis == "world":
            return tuple(range(schedule.stages * dp * tp))
        stages = placement.ends if axis == "tied" else (stage,)
        ds = range(dp) if axis == "dp" else (d,)
        ts = range(tp) if axis == "tp" else (t,)
        return tuple((s * dp + a) * tp + b for s in stages for a in ds for b in ts)

    def message(stage: int, d: int, t: int, kind: Kind, position: int) -> tuple[str, int, str, tuple[int, ...]]:
        """Return the letter, sending position, channel and ranks of a send or receive action."""
        peer = placement.peer(kind, position)
        sender = position if kind.sends else placement.other_end(kind, position)
        ends = tuple((rank * dp + d) * tp + t for rank in ((stage, peer) if kind.sends else (peer, stage)))
        return kind.value[1], sender, placement.channel(kind, position).value, ends

    def written_out(stage: int, d: int, t: int) -> list[ListEntry]:
        steps: list[ListEntry] = []
        place: dict[tuple[Kind, int, int], int] = {}
        used = {(action.kind, action.position) for action in schedule.actions[stage]}
        messages = {key: message(stage, d, t, *key) for key in used if not key[0].computes}
        receives = {key: placement.received_by(*key) for key in used if key[0].computes}

        def collective(call: Call, where: str) -> None:
            ranks = members(call[0], stage, d, t)
            if len(ranks) > 1:
                steps.append(ListEntry(f"{call[0]} {call[1]} {where}", call[0], ranks))

        for call in collectives.before:
            collective(call, "before the first action")
        for action in schedule.actions[stage]:
            kind = action.kind
            microbatch = action.microbatch
            position = action.position
            if (kind, position) in messages:
                letter, sender, channel, ends = messages[kind, position]
                place[kind, microbatch, position] = len(steps)
                steps.append(ListEntry(f"{letter}{microbatch}@{sender}'s message", channel, ends))
                continue
            receive = receives[kind, position]
            text = str(action)
            steps.append(ListEntry(text, after=(place[receive, microbatch, position],) if receive else ()))
            first = len(steps)
            for call in collectives.of(action):
                collective(call, f"in {action}")
            waited = tuple(index for index in range(first, len(steps)) if steps[index].stream == "tp")
            steps.append(ListEntry(text, after=waited))
        for call in collectives.behind.get(stage, ()):
            collective(call, "behind the last action")
        return steps

    return [written_out(stage, d, t) for stage in range(schedule.stages) for d in range(dp) for t in range(tp)]


def check_order(lists: Sequence[Sequence[ListEntry]], in_flight: int | None = 1) -> None:
    """Raise ScheduleError if the lists deadlock with at most `in_flight` communications per rank. The error names the
    entry for which each rank waits.

    Communication is not buffered. It ends when it is the first unfinished entry of its stream on all its ranks. A rank
    with `in_flight` unfinished communications (None: no bound) does not continue.
    """
    _Ranks(lists, in_flight).run()


class _Ranks:
    """The state of all ranks: the position in each rank's list, and the communications in flight."""

    def __init__(self, lists: Sequence[Sequence[ListEntry]], in_flight: int | None) -> None:
        self.lists = lists
        self.in_flight = in_flight
        self.place = [0] * len(lists)
        self.ended: list[set[int]] = [set() for _ in lists]
        self.open: list[dict[str, deque[int]]] = [defaultdict(deque) for _ in lists]

    def run(self) -> None:
        runnable = set(range(len(self.lists)))
        while runnable:
            rank = runnable.pop()
            runnable |= self.advance(rank)
        stuck = {
            rank: self.obstacle(rank)
            for rank in range(len(self.lists))
            if self.place[rank] < len(self.lists[rank]) or self.issued(rank)
        }
        if stuck:
            raise ScheduleError(
                [Problem(f"rank {rank}", f"deadlock: waits for {what}") for rank, what in stuck.items()]
            )

    def issued(self, rank: int) -> int:
        """Return the number of communications in flight."""
        return sum(map(len, self.open[rank].values()))

    def obstacle(self, rank: int) -> str:
        """Return the text of the entry for which a stuck rank waits."""
        first = min((queue[0] for queue in self.open[rank].values() if queue), default=self.place[rank])
        return self.lists[rank][first].what

    def advance(self, rank: int) -> set[int]:
        """Execute one rank's list until the rank waits. Returns the ranks that may now continue."""
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
        """End each communication that is the first unfinished one of this stream on all its ranks. Returns the ranks
        that may now continue.
        """
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
                    raise ScheduleError(
                        f"rank {rank} starts {event.what}, but rank {other} starts {there} on the {stream} channel"
                    )
            for other, head in same:
                self.open[other][stream].popleft()
                self.ended[other].add(head)
            freed |= set(event.ranks)
            ranks += event.ranks
        return freed
