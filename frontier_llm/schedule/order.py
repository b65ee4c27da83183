"""The one order of communication. Every message and every collective is one event that its ranks share, and all ranks
play restrictions of one topological order of these events. So the earliest unfinished event stands at the head of each
participant's queue, and no circular wait exists, however few communications a rank may have in flight: one is enough
(tests/harness/dry_run.py plays it so).

The order comes from the schedule played with actions of equal length: a message stands where its producer ends, a
compute action and the collectives inside it where it starts. Ranks then wait little for each other. With a single
communication in flight, host and compute waiting for it, and a message of 2 % of a forward (simulated): 1F1B and GPipe
lose 0.9 to 1.4 %, ZB-H1 1.2 to 2.2 %, interleaved in whole rounds 1.8 to 9.3 %, and with an incomplete last round (5
stages, 13 microbatches, 3 chunks) 24 to 38 %. Two other orders are as safe and were rejected: each message directly
behind its producer's start loses 8 to 221 %, compute at its end 8 to 129 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import itemgetter

from frontier_llm.errors import FrontierError, Problem
from frontier_llm.schedule.actions import Action, Kind, Placement, units
from frontier_llm.schedule.simulate import play

_LENGTH = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
_ARRIVES = {Kind.SEND_FORWARD: Kind.RECV_FORWARD, Kind.SEND_BACKWARD: Kind.RECV_BACKWARD}


class ScheduleError(FrontierError):
    """A schedule that cannot be played, or that would compute the wrong thing."""


def with_messages(
    placement: Placement,
    orders: Sequence[Sequence[Action]],
    backward: float = 2.0,
    pairs: bool = False,
) -> tuple[tuple[Action, ...], ...]:
    """Each rank's restriction of the order: its compute actions, and its side of every message. `backward`: length of a
    B beside an F of 1.

    With `pairs` no message stands within one: its collectives are one event of the order, whichever way they
    interleave. Raises ScheduleError when the ranks' orders of compute wait for each other in a circle.
    """
    length = {**_LENGTH, Kind.BACKWARD: backward}
    starts, ends = play(placement, orders, lambda rank, action: length[action.kind], pairs)
    stuck = [(rank, orders[rank][len(times)]) for rank, times in enumerate(ends) if len(times) < len(orders[rank])]
    if stuck:
        raise ScheduleError(
            [
                Problem(where=f"stage {rank}", what=f"deadlock: {action} waits for its neighbour")
                for rank, action in stuck
            ]
        )
    routes = {
        (kind, position): _route(placement, kind, position)
        for kind in _LENGTH
        for position in range(len(placement.rank_of))
    }
    messages = sorted(
        (
            (end, rank, action, route)
            for rank, order in enumerate(orders)
            for end, action in zip(ends[rank], order, strict=True)
            if (route := routes[action.kind, action.position])
        ),
        key=itemgetter(0, 1),  # those of a pair leave together, the forward's first
    )
    played: list[list[Action]] = [[] for _ in orders]
    begun = [0] * len(orders)
    for times in starts:
        times.append(inf)
    for moment, rank, action, (send, receive, position, peer) in messages:
        microbatch = action.microbatch
        for end, message in (
            (rank, Action(send, microbatch, action.position)),
            (peer, Action(receive, microbatch, position)),
        ):
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


def posted_ahead(actions: Sequence[Action], pairs: bool = False) -> list[Action]:
    """The same messages in the same sequence, each receive one compute action (or pair) early, so that it is open when
    the message comes.

    For runtimes with many communications in flight: nothing waits behind a posted receive there.
    """
    ahead: list[Action] = []
    place = 0  # where the next receive goes: before the compute action that it stands behind
    for unit in units(actions, pairs):
        if unit[0].kind in _ARRIVES.values():
            ahead[place:place] = unit
            place += 1
        else:
            place = len(ahead) + (not unit[0].kind.computes)
            ahead += unit
    return ahead
