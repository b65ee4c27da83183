"""The common order of communication of all pipeline ranks.

Every message and every collective is one event that its ranks share. All events have one topological order, and each
rank executes its own events in this order. The earliest unfinished event is therefore the next event of each of its
participants, and ranks never wait for each other in a circle. This holds even if a rank may have only one communication
in flight (tests/harness/dry_run.py executes schedules in this way).

It also holds for any assignment of a rank's streams to hardware queues, compute's included. A packet waits only for
packets that the host issued before it, and a communication for its other ranks. If all earlier events have ended, the
packets before the next event can end too. It then reaches the head of its queue on all its ranks
(tests/harness/queues.py).

The order comes from a simulation of the schedule with fixed lengths of the actions. A message is placed at the end of
the action that produces it. A compute action, with the collectives inside it, is placed at its start. Ranks then wait
little for each other. Simulated with one communication in flight, for which host and compute wait, and a message of 2 %
of a forward, the losses are:

* 1F1B and GPipe: 0.9 to 1.4 %
* ZB-H1: 1.2 to 2.2 %
* interleaved with complete rounds: 1.8 to 9.3 %
* interleaved with an incomplete last round (5 stages, 13 microbatches, 3 chunks): 24 to 38 %

Two other orders are equally safe and were rejected. Placing each message directly after its producer's start loses 8 to
221 %. Placing compute actions at their end loses 8 to 129 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import itemgetter

from frontier_llm.errors import FrontierError, Problem
from frontier_llm.schedule.actions import Action, Kind, Placement, units
from frontier_llm.schedule.simulate import compute_times

_LENGTH = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
_ARRIVES = {Kind.SEND_FORWARD: Kind.RECV_FORWARD, Kind.SEND_BACKWARD: Kind.RECV_BACKWARD}


class ScheduleError(FrontierError):
    """A schedule that cannot be executed, or that would compute a wrong result."""


def with_messages(
    placement: Placement,
    orders: Sequence[Sequence[Action]],
    backward: float = 2.0,
    pairs: bool = False,
) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's part of the common order: its compute actions and its side of every message.

    `backward` is the length of a B relative to an F. With `pairs` no message is placed inside a pair: all collectives
    of the pair are one event of the order. Raises ScheduleError if the ranks' orders of compute cause a deadlock.
    """
    length = {**_LENGTH, Kind.BACKWARD: backward}
    starts, ends = compute_times(placement, orders, lambda rank, action: length[action.kind], pairs)
    stuck = [(rank, orders[rank][len(times)]) for rank, times in enumerate(ends) if len(times) < len(orders[rank])]
    if stuck:
        raise ScheduleError(
            [
                Problem(
                    where=f"stage {rank}",
                    what=f"deadlock: {action} waits for an action of another rank that never starts",
                )
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
        key=itemgetter(0, 1),  # a pair's two messages have equal times; the sort is stable, so the forward's is first
    )
    placed: list[list[Action]] = [[] for _ in orders]
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
            while times[place] < moment:  # the message follows all actions that the rank has begun by then
                place += 1
            if place > first:
                placed[end] += orders[end][first:place]
                begun[end] = place
            placed[end].append(message)
    return tuple((*actions, *order[done:]) for actions, order, done in zip(placed, orders, begun, strict=True))


def _route(placement: Placement, kind: Kind, position: int) -> tuple[Kind, Kind, int, int] | None:
    """Return (send, receive, receiving position, receiving rank) of a compute action's message; None without one."""
    send = placement.sent_by(kind, position)
    return send and (send, _ARRIVES[send], placement.other_end(send, position), placement.peer(send, position))


def posted_ahead(actions: Sequence[Action], pairs: bool = False) -> list[Action]:
    """Move each receive one compute action (or pair) earlier, so that it is posted when the message arrives.

    The messages keep their sequence. Use it only with many communications in flight: a posted receive then blocks
    no other communication.
    """
    ahead: list[Action] = []
    place = 0  # index for the next receive: before the compute action that precedes it
    for unit in units(actions, pairs):
        if unit[0].kind in _ARRIVES.values():
            ahead[place:place] = unit
            place += 1
        else:
            place = len(ahead) + (not unit[0].kind.computes)
            ahead += unit
    return ahead
