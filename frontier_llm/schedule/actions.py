"""A pipeline schedule as data: one ordered list of actions per pipeline rank.

The engine executes these lists. The simulator, the checker and the figures use the same lists.

Vocabulary: a `stage` or `rank` is a pipeline rank (0 … pp-1). A `position` is the index of a virtual stage in the model
(0 … pp·chunks-1). Activations are sent from each position to position + 1, and gradients in the opposite direction.
`Placement` maps positions to ranks.

Pairs: a rank may execute the forward of one microbatch and the backward of another together. The all-to-alls to experts
of the forward then overlap with the compute of the backward, and the reverse. Both actions begin when both have their
inputs. Their messages are sent when both have ended. In the order of communication a pair is one event, because all
ranks that take part in its collectives execute the same pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

FORWARD_ONLY = "forward-only"  # name of schedules without backward, for evaluation


class Kind(Enum):
    """Kind of an action. The value is its letter in the textual form ('F3', 'I0.1')."""

    FORWARD = "F"
    BACKWARD = "B"  # input gradient and weight gradient together
    BACKWARD_INPUT = "I"  # input gradient only; the weight gradient follows as W (zero-bubble schedules)
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SF"  # send this position's output activation to the next position.
    # Post the receive of this position's input activation, for which the F of the same microbatch waits
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"  # send the gradient of this position's input to the previous position
    RECV_BACKWARD = "RB"  # post the receive of the gradient of this position's output; B or I waits for it

    # Enum's own hash is a Python function, which would take half of a simulation's time. Members are singletons, so the
    # identity suffices.
    __hash__ = object.__hash__

    @property
    def computes(self) -> bool:
        """True for the kinds that occupy the device, False for communication."""
        return self in COMPUTES

    @property
    def sends(self) -> bool:
        """True for the sending side of a message."""
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


COMPUTES = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
_NEEDS = {Kind.FORWARD: Kind.RECV_FORWARD, Kind.BACKWARD: Kind.RECV_BACKWARD, Kind.BACKWARD_INPUT: Kind.RECV_BACKWARD}
_MAKES = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD, Kind.BACKWARD_INPUT: Kind.SEND_BACKWARD}
_STEP = {Kind.SEND_FORWARD: 1, Kind.RECV_FORWARD: -1, Kind.SEND_BACKWARD: -1, Kind.RECV_BACKWARD: 1}


class Channel(Enum):
    """Communicator of the pipeline ranks for messages of one kind in one direction.

    A channel keeps the order of its messages, so no tags are needed. Between two ranks, only one of them sends on a
    channel, for any placement of the virtual stages.
    """

    FORWARD = "forward"  # activations, to a rank with a higher number
    FORWARD_WRAP = "forward-wrap"  # activations, to a rank with a lower number (interleaved, or 2nd half of a V)
    BACKWARD = "backward"  # gradients, to a rank with a lower number
    BACKWARD_WRAP = "backward-wrap"  # gradients, to a rank with a higher number


class Action(NamedTuple):
    """One entry of a rank's list: a compute action, or one side of a message, of one microbatch and position."""

    kind: Kind
    microbatch: int
    position: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}@{self.position}"


@dataclass(frozen=True)
class Placement:
    """Assignment of virtual stages to pipeline ranks. Neighbouring positions on the same rank exchange no message."""

    rank_of: tuple[int, ...]  # pipeline rank of each virtual stage, by position in the model

    @cached_property
    def ranks(self) -> int:
        """Number of pipeline ranks, pp."""
        return max(self.rank_of) + 1

    @property
    def chunks(self) -> int:
        """Number of virtual stages per rank, v."""
        return len(self.rank_of) // self.ranks

    @property
    def last(self) -> int:
        """Position of the last virtual stage, which has the output head."""
        return len(self.rank_of) - 1

    @property
    def ends(self) -> tuple[int, ...]:
        """The ranks that hold the embedding and the head. The tuple has one rank if that rank holds both."""
        return tuple(dict.fromkeys((self.rank_of[0], self.rank_of[-1])))

    def positions_of(self, rank: int) -> tuple[int, ...]:
        """Return the positions that a rank holds, in the order of the model."""
        return tuple(position for position, holder in enumerate(self.rank_of) if holder == rank)

    def other_end(self, kind: Kind, position: int) -> int:
        """Return the position with which a SEND or RECV of `position` exchanges its message."""
        return position + _STEP[kind]

    def peer(self, kind: Kind, position: int) -> int:
        """Return the rank with which a SEND or RECV of `position` exchanges its message."""
        return self.rank_of[position + _STEP[kind]]

    def received_by(self, kind: Kind, position: int) -> Kind | None:
        """Return the kind of receive for which a compute action waits.

        None at the model's ends, for W, and if the neighbouring position is on the same rank.
        """
        return self._crossing(_NEEDS.get(kind), position)

    def sent_by(self, kind: Kind, position: int) -> Kind | None:
        """Return the kind of send that follows a compute action.

        None at the model's ends, for W, and if the neighbouring position is on the same rank.
        """
        return self._crossing(_MAKES.get(kind), position)

    def _crossing(self, message: Kind | None, position: int) -> Kind | None:
        other = -1 if message is None else position + _STEP[message]
        if 0 <= other <= self.last and self.rank_of[other] != self.rank_of[position]:
            return message
        return None

    def channel(self, kind: Kind, position: int) -> Channel:
        """Return the channel of a SEND or RECV."""
        here = self.rank_of[position]
        there = self.peer(kind, position)
        rises = (here < there) == kind.sends
        if kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD):
            return Channel.FORWARD if rises else Channel.FORWARD_WRAP
        return Channel.BACKWARD_WRAP if rises else Channel.BACKWARD

    @cached_property
    def streams(self) -> dict[Channel, list[tuple[int, int]]]:
        """Return channel → pairs (sender, receiver) of ranks, for every channel in use.

        Pairs whose lower rank is even come first. Consecutive ranks form pairs without a common rank, so that these
        connections can be opened in parallel.
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
    """Return the placement of interleaved Megatron-LM: position p is on rank p mod pp."""
    return Placement(tuple(range(stages)) * chunks)


@dataclass(frozen=True)
class Schedule:
    """A schedule for one training step.

    `actions[stage]` has the compute actions of a pipeline rank and its side of each message. The lists of all ranks
    follow one common order of communication (schedule/order.py).
    """

    name: str  # name in the registry, or FORWARD_ONLY
    placement: Placement
    microbatches: int  # microbatches of one data-parallel replica in one step, m
    actions: tuple[tuple[Action, ...], ...]
    pairs: bool = False  # True: a forward and the backward directly after it are executed together, if they are a pair

    @property
    def stages(self) -> int:
        """Number of pipeline ranks, pp."""
        return self.placement.ranks

    @property
    def chunks(self) -> int:
        """Number of virtual stages per rank, v."""
        return self.placement.chunks

    @cached_property
    def compute(self) -> tuple[tuple[Action, ...], ...]:
        """Compute actions of each rank, without messages."""
        return tuple(tuple(action for action in actions if action.kind in COMPUTES) for actions in self.actions)

    @property
    def length(self) -> int:
        """Number of actions of all ranks in a training step.

        The send and the receive of each message are counted, even if `actions` was built without messages.
        """
        crossings = sum(
            self.placement.sent_by(kind, position) is not None
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for position in range(len(self.placement.rank_of))
        )
        return sum(map(len, self.compute)) + 2 * crossings * self.microbatches

    def label(self, action: Action) -> str:
        """Return the label of an action in figures: 'F3', or 'F3.1' for the second virtual stage of a rank."""
        chunk = self.placement.rank_of[: action.position].count(self.placement.rank_of[action.position])
        return f"{action.kind.value}{action.microbatch}" + (f".{chunk}" if chunk else "")


_GRADIENTS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def is_pair(first: Action, second: Action) -> bool:
    """Return True if two consecutive actions of a rank are a pair.

    In a pair the first is a forward, and the second is a backward (B or I) of the rank's other position.
    """
    return first.kind is Kind.FORWARD and second.kind in _GRADIENTS and second.position != first.position


def units(actions: Sequence[Action], pairs: bool) -> Iterator[tuple[Action, ...]]:
    """Yield each action as a tuple of one action. With `pairs`, the two actions of a pair are one tuple."""
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
    """Map the backward of each pair to its forward, for one pipeline rank or for all ranks."""
    orders = schedule.compute[slice(rank, None if rank is None else rank + 1)] if schedule.pairs else ()
    return {second: first for order in orders for first, second in pairwise(order) if is_pair(first, second)}
