"""The common order in which all pipeline ranks execute their messages and collectives, which excludes deadlocks.

Every message and every collective is one event for all its ranks. The events of all ranks are sorted in one topological
order, and each rank executes its own events in this order. The earliest unfinished event is therefore the next event of
each of its participants, and ranks never wait for each other in a circle. This holds even if a rank may have only one
communication in flight (schedule/dry_run.py executes schedules in this way).

Ranks do not deadlock either if several GPU streams of a rank share a hardware queue. A packet in a queue waits only for
packets that the host issued earlier, and a communication also for its other ranks. If all earlier events have ended,
the packets that precede the next event can end too. The next event then reaches the head of its queue on all its ranks
(tests/harness/queues.py).

The order comes from a simulation of the schedule with fixed lengths of the actions. A message is placed at the end of
the action that produces it. A compute action, with the collectives inside it, is placed at its start. With this order
ranks wait little for each other. The list has the additional time of a step with one communication in flight, if host
and compute wait for each communication. It is simulated with messages that take 2 % of a forward:

* 1F1B and GPipe: 0.9 to 1.4 %
* ZB-H1: 1.2 to 2.2 %
* interleaved with complete rounds: 1.8 to 9.3 %
* interleaved with an incomplete last round (5 stages, 13 microbatches, 3 chunks): 24 to 38 %

Two other orders are equally safe but slower. If each message is placed directly after the start of its compute action,
a step takes 8 to 221 % longer. If compute actions are placed at their end, it takes 8 to 129 % longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import itemgetter

from frontier_llm.schedule.actions import Action, Kind, Placement, units
from frontier_llm.schedule.simulate import compute_times

_LENGTH = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
_ARRIVES = {Kind.SEND_FORWARD: Kind.RECV_FORWARD, Kind.SEND_BACKWARD: Kind.RECV_BACKWARD}


def with_messages(
    placement: Placement,
    orders: Sequence[Sequence[Action]],
    backward: float = 2.0,
    pairs: bool = False,
) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's part of the common order: its compute actions and its side of every message.

    `backward` is the assumed length of a B relative to an F. With `pairs` no message is placed between the two actions
    of a pair, because all collectives of a pair are one event. Raises ScheduleError if the ranks' orders of compute
    cause a deadlock.
    """
    length = {**_LENGTH, Kind.BACKWARD: backward}
    starts, ends = compute_times(placement, orders, lambda rank, action: length[action.kind], pairs)
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
        # The two messages of a pair have equal times. The sort is stable, so the forward's message comes first.
        key=itemgetter(0, 1),
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
            while times[place] < moment:  # place the message after all actions that have begun before it is sent
                place += 1
            if place > first:
                placed[end] += orders[end][first:place]
                begun[end] = place
            placed[end].append(message)
    return tuple((*actions, *order[done:]) for actions, order, done in zip(placed, orders, begun, strict=True))


def _route(placement: Placement, kind: Kind, position: int) -> tuple[Kind, Kind, int, int] | None:
    """Return (send, receive, receiving position, receiving rank) of a compute action's message, if it has one."""
    send = placement.sent_by(kind, position)
    return send and (send, _ARRIVES[send], placement.other_end(send, position), placement.peer(send, position))


def posted_ahead(actions: Sequence[Action], pairs: bool = False) -> list[Action]:
    """Move each receive one compute action (or pair) earlier, so that it is posted when the message arrives.

    The order of the messages does not change. The function is only for runs with many communications in flight. With
    one communication in flight, a posted receive would block all other communication.
    """
    ahead: list[Action] = []
    place = 0  # index in `ahead` for the next receive: before the latest compute action
    for unit in units(actions, pairs):
        if unit[0].kind in _ARRIVES.values():
            ahead[place:place] = unit
            place += 1
        else:
            place = len(ahead) + (not unit[0].kind.computes)
            ahead += unit
    return ahead
