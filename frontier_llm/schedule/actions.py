"""A pipeline schedule as data: what each pipeline rank does, in order. Engine, simulator, checker and figure play this
list.

Vocabulary: `stage` or `rank` = pipeline rank (0 … pp-1); `position` = place of a virtual stage in the model (0 …
pp·chunks-1). Activations flow from position to position + 1, gradients back. Which rank holds a position is the
placement's to say, and nobody else's.

Pairs: a rank may execute a forward and the backward of another microbatch together, so that each one's rows to experts
travel under the other's compute. Both begin when both have their inputs, and their messages follow when both have
ended. In the order of communication a pair is one event: ranks that share its collectives execute the same pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

FORWARD_ONLY = "forward-only"  # name of a schedule that evaluates


class Kind(Enum):
    """What an action does; the value is its letter in the textual form ('F3', 'I0.1')."""

    FORWARD = "F"
    BACKWARD = "B"  # input gradient and weight gradient together
    BACKWARD_INPUT = "I"  # input gradient only; its weight gradient follows as W (zero-bubble schedules)
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SF"  # send this position's output activation to the next position
    # post the receive of this position's input activation; the F of the same microbatch waits for it
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"  # send the gradient of this position's input to the previous position
    RECV_BACKWARD = "RB"  # post the receive of the gradient of this position's output; B or I waits for it

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call, half of a simulation's time

    @property
    def computes(self) -> bool:
        """True for the kinds that occupy the device, False for communication."""
        return self in COMPUTES

    @property
    def sends(self) -> bool:
        """True for the sender's side of a message."""
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


COMPUTES = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
_NEEDS = {Kind.FORWARD: Kind.RECV_FORWARD, Kind.BACKWARD: Kind.RECV_BACKWARD, Kind.BACKWARD_INPUT: Kind.RECV_BACKWARD}
_MAKES = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD, Kind.BACKWARD_INPUT: Kind.SEND_BACKWARD}
_STEP = {Kind.SEND_FORWARD: 1, Kind.RECV_FORWARD: -1, Kind.SEND_BACKWARD: -1, Kind.RECV_BACKWARD: 1}


class Channel(Enum):
    """The independent streams of a pipeline rank. Each carries one kind of message in one direction, in one order that
    both sides share.

    So no tags are needed, and two ranks never write to each other on one channel, wherever the virtual stages live.
    """

    FORWARD = "forward"  # activations, to a rank of a higher number
    FORWARD_WRAP = "forward-wrap"  # to a lower one: the wrap-around of interleaved chunks, the way back of a V
    BACKWARD = "backward"  # gradients, to a rank of a lower number
    BACKWARD_WRAP = "backward-wrap"


class Action(NamedTuple):
    """One entry of a rank's list."""

    kind: Kind
    microbatch: int
    position: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}@{self.position}"


@dataclass(frozen=True)
class Placement:
    """Which pipeline rank holds each virtual stage. Neighbours on the same rank (the turn of a V) exchange no
    message.
    """

    rank_of: tuple[int, ...]  # by position in the model

    @cached_property
    def ranks(self) -> int:
        """Pipeline ranks, pp."""
        return max(self.rank_of) + 1

    @property
    def chunks(self) -> int:
        """Virtual stages per rank, v."""
        return len(self.rank_of) // self.ranks

    @property
    def last(self) -> int:
        """Position of the head."""
        return len(self.rank_of) - 1

    @property
    def ends(self) -> tuple[int, ...]:
        """The ranks that hold the embedding and the head: two, or one that holds both."""
        return tuple(dict.fromkeys((self.rank_of[0], self.rank_of[-1])))

    def positions_of(self, rank: int) -> tuple[int, ...]:
        """What a rank holds, in the order of the model."""
        return tuple(position for position, holder in enumerate(self.rank_of) if holder == rank)

    def other_end(self, kind: Kind, position: int) -> int:
        """Position at the other end of a SEND or RECV."""
        return position + _STEP[kind]

    def peer(self, kind: Kind, position: int) -> int:
        """Rank at the other end of a SEND or RECV."""
        return self.rank_of[position + _STEP[kind]]

    def received_by(self, kind: Kind, position: int) -> Kind | None:
        """The receive that a compute action waits for; None at the model's ends, for W, and from a neighbour on the
        same rank.
        """
        return self._crossing(_NEEDS.get(kind), position)

    def sent_by(self, kind: Kind, position: int) -> Kind | None:
        """The send that follows a compute action; None likewise."""
        return self._crossing(_MAKES.get(kind), position)

    def _crossing(self, message: Kind | None, position: int) -> Kind | None:
        other = -1 if message is None else position + _STEP[message]
        if 0 <= other <= self.last and self.rank_of[other] != self.rank_of[position]:
            return message
        return None

    def channel(self, kind: Kind, position: int) -> Channel:
        """The channel of a SEND or RECV."""
        here = self.rank_of[position]
        there = self.peer(kind, position)
        rises = (here < there) == kind.sends
        if kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD):
            return Channel.FORWARD if rises else Channel.FORWARD_WRAP
        return Channel.BACKWARD_WRAP if rises else Channel.BACKWARD

    @cached_property
    def streams(self) -> dict[Channel, list[tuple[int, int]]]:
        """(sender, receiver) pairs of every channel in use, neighbours that share no rank first, so that they can be
        opened at once.
        """
        pairs: dict[Channel, set[tuple[int, int]]] = {}
        for position, rank in enumerate(self.rank_of):
            for kind in filter(None, (self.sent_by(Kind.FORWARD, position), self.sent_by(Kind.BACKWARD, position))):
                pairs.setdefault(self.channel(kind, position), set()).add((rank, self.peer(kind, position)))
        return {
            channel: sorted(pairs[channel], key=lambda pair: (min(pair) % 2, pair))
            for channel in Channel
            if channel in pairs
        }


def round_robin(stages: int, chunks: int = 1) -> Placement:
    """Virtual stages dealt out in turn, as in Megatron-LM: position p lives on rank p mod pp."""
    return Placement(tuple(range(stages)) * chunks)


@dataclass(frozen=True)
class Schedule:
    """`actions[stage]` is what that pipeline rank plays in one training step, messages included, in the one order of
    communication.
    """

    name: str  # as registered, or forward-only
    placement: Placement
    microbatches: int  # m, per data-parallel replica and step
    actions: tuple[tuple[Action, ...], ...]
    pairs: bool = False  # forwards and backwards that stand as pairs are played together (schedule/actions.py)

    @property
    def stages(self) -> int:
        """Pipeline ranks, pp."""
        return self.placement.ranks

    @property
    def chunks(self) -> int:
        """Virtual stages per rank, v."""
        return self.placement.chunks

    @cached_property
    def compute(self) -> tuple[tuple[Action, ...], ...]:
        """The lists without communication."""
        return tuple(tuple(action for action in actions if action.kind in COMPUTES) for actions in self.actions)

    @property
    def length(self) -> int:
        """Actions of all ranks in a training step, both sides of each message included, whether `actions` has them
        or not.
        """
        crossings = sum(
            self.placement.sent_by(kind, position) is not None
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for position in range(len(self.placement.rank_of))
        )
        return sum(map(len, self.compute)) + 2 * crossings * self.microbatches

    def label(self, action: Action) -> str:
        """'F3' for people; 'F3.1' where ranks hold several virtual stages and this is a rank's second."""
        chunk = self.placement.rank_of[: action.position].count(self.placement.rank_of[action.position])
        return f"{action.kind.value}{action.microbatch}" + (f".{chunk}" if chunk else "")


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
