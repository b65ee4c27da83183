"""The list of actions played against a clock: exact for given durations, so closed forms can be checked and plans compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from frontier_llm.schedule.actions import Action, Kind, Schedule
from frontier_llm.schedule.channels import chunk_at_peer, peer_of, received_by

_SENDS_TO = {Kind.SEND_FORWARD: Kind.RECV_FORWARD, Kind.SEND_BACKWARD: Kind.RECV_BACKWARD}


@dataclass(frozen=True)
class Timeline:
    """When each compute action runs. `start_s[stage][n]` belongs to the n-th compute action of that stage."""

    schedule: Schedule
    start_s: tuple[list[float], ...]
    end_s: tuple[list[float], ...]

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
        return zip(self.schedule.compute_actions(stage), self.start_s[stage], self.end_s[stage], strict=True)


class _Link:
    """One directed channel: a message leaves when it is sent, its receive is posted and the message before it has arrived."""

    def __init__(self, messages: int, send_s: float) -> None:
        self.send_s = send_s
        self.sent_s: list[float | None] = [None] * messages
        self.posted_s: list[float | None] = [None] * messages
        self.arrival_s: list[float | None] = [None] * messages
        self.free_s = 0.0

    def meet(self, message: int) -> None:
        """Start the transfer if both ends are there."""
        sent_s, posted_s = self.sent_s[message], self.posted_s[message]
        if sent_s is not None and posted_s is not None:
            self.free_s = max(sent_s, posted_s, self.free_s) + self.send_s
            self.arrival_s[message] = self.free_s


class _Wire(NamedTuple):
    """Where the actions of one kind and chunk find their messages."""

    link: _Link | None  # None: a compute action that waits for none
    first: int  # of the link's messages; the microbatch counts on from here
    target: int  # the stage that a send may wake


def simulate(schedule: Schedule, duration: Callable[[int, Action], float], send_s: float | Callable[[int, int], float] = 0.0) -> Timeline:
    """Play the schedule. `duration(stage, action)` gives the seconds of a compute action.

    `send_s` is the seconds of one transfer between neighbours, or a function of (source stage, target stage). Communication
    takes no time on the rank; a transfer starts when it is sent and its receive is posted, one at a time per directed channel.
    The schedule must be legal (see `check`). One step of 1600 microbatches on 64 stages takes about a second.
    """
    return _Player(schedule, duration, send_s).play()


class _Player:
    """State of a simulation: one clock and one position per stage, one link per stage and direction of arrival."""

    def __init__(self, schedule: Schedule, duration: Callable[[int, Action], float], send_s: float | Callable[[int, int], float]) -> None:
        self.schedule, self.duration = schedule, duration
        stages, messages = schedule.stages, schedule.microbatches * schedule.chunks
        seconds = send_s if callable(send_s) else lambda source, target: send_s
        self.inbox = {
            kind: [_Link(messages, seconds(peer_of(kind, stage, stages), stage)) for stage in range(stages)] for kind in _SENDS_TO.values()
        }
        self.wires = [
            {(kind, chunk): self._wire(kind, chunk, stage) for kind, chunk in product(Kind, range(schedule.chunks))}
            for stage in range(stages)
        ]
        self.position, self.clock_s = [0] * stages, [0.0] * stages
        self.start_s: tuple[list[float], ...] = tuple([] for _ in range(stages))
        self.end_s: tuple[list[float], ...] = tuple([] for _ in range(stages))

    def _wire(self, kind: Kind, chunk: int, stage: int) -> _Wire:
        """Looked up once, not for each of a schedule's 100,000 actions."""
        stages, chunks, microbatches = self.schedule.stages, self.schedule.chunks, self.schedule.microbatches
        if kind in _SENDS_TO:
            target = peer_of(kind, stage, stages)
            return _Wire(self.inbox[_SENDS_TO[kind]][target], chunk_at_peer(kind, stage, chunk, stages) * microbatches, target)
        arrives = kind if kind in self.inbox else received_by(Action(kind, 0, chunk), stage, stages, chunks)
        return _Wire(self.inbox[arrives][stage] if arrives else None, chunk * microbatches, stage)

    def play(self) -> Timeline:
        """All stages, each as far as it gets, until none is left."""
        runnable = set(range(self.schedule.stages))
        while runnable:
            self._advance(runnable.pop(), runnable)
        assert all(self.position[stage] == len(actions) for stage, actions in enumerate(self.schedule.actions)), "deadlock: run check()"
        return Timeline(self.schedule, self.start_s, self.end_s)

    def _advance(self, stage: int, runnable: set[int]) -> None:
        """Play one stage until it waits for a message that was not sent yet; note which stages its sends make runnable."""
        actions, clock_s, duration, wires = self.schedule.actions[stage], self.clock_s[stage], self.duration, self.wires[stage]
        starts_s, ends_s = self.start_s[stage], self.end_s[stage]
        position = self.position[stage]
        while position < len(actions):
            action = actions[position]
            kind = action.kind
            link, first, target = wires[kind, action.chunk]
            message = first + action.microbatch
            if link is None or kind.computes:
                if link is not None:
                    arrival_s = link.arrival_s[message]
                    if arrival_s is None:
                        break
                    clock_s = max(clock_s, arrival_s)
                starts_s.append(clock_s)
                clock_s += duration(stage, action)
                ends_s.append(clock_s)
            elif kind in _SENDS_TO:
                link.sent_s[message] = clock_s
                link.meet(message)
                runnable.add(target)
            else:
                link.posted_s[message] = clock_s
                link.meet(message)
            position += 1
        self.position[stage], self.clock_s[stage] = position, clock_s
