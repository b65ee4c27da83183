"""Executes lists of communication on devices whose streams share hardware queues.

A queue runs its packets in the order in which the host issued them. Each packet waits for the packet before it, even if
the two packets belong to different streams. A packet may also wait for earlier packets of other streams (events). A
communication ends when its packet is at the head of a queue on all its ranks. A function gives the queue of each
packet. A stream may therefore move between queues, as in newer ROCm, which assigns streams to queues by load. The
packets of a stream keep their order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from frontier_llm.errors import Problem
from frontier_llm.schedule import ScheduleError
from frontier_llm.schedule.dry_run import ListEntry

COMPUTE = "compute"
# Stream of comm.group.OneInFlight, through which all communication is issued with one in flight.
ONE = "one in flight"

Event = tuple[str, str, tuple[int, ...], int]  # text, stream, ranks, number among equal communications


@dataclass(frozen=True)
class Packet:
    """An entry of a hardware queue: a kernel, or a wait for events. Hosts issue packets in the order of their list."""

    stream: str
    after: tuple[int, ...]  # indices of earlier packets of this rank that must have ended
    event: Event | None = None  # the communication, shared with other ranks


def packets(listed: Sequence[ListEntry], one_in_flight: bool) -> list[Packet]:
    """Return the packets that a rank's host issues for its list, as comm.group does."""
    issued: list[Packet] = []
    last: dict[str, int] = {}
    end_of_step: dict[int, int] = {}  # index of a communication's step -> its packet
    seen = Counter[tuple[str, str]]()

    def issue(stream: str, *after: int, event: Event | None = None) -> int:
        before = (last[stream],) if stream in last else ()
        issued.append(Packet(stream, (*before, *after), event))
        last[stream] = len(issued) - 1
        return last[stream]

    issue(COMPUTE)
    for index, step in enumerate(listed):
        if not step.ranks:
            for needed in step.after:
                issue(COMPUTE, end_of_step[needed])
            issue(COMPUTE)
            continue
        ready = issue(ONE, last[COMPUTE]) if one_in_flight else last[COMPUTE]
        # torch makes one communicator, and so one stream, for each pair of ranks of a pipeline channel
        stream = f"{step.stream} {step.ranks}"
        issue(stream, ready)
        event = (step.what, step.stream, step.ranks, seen[step.what, step.stream])
        seen[step.what, step.stream] += 1
        end_of_step[index] = issue(stream, event=event)
        if one_in_flight:
            issue(ONE, end_of_step[index])
    return issued


def execute(ranks: Sequence[Sequence[Packet]], queue_of: Callable[[int, Packet], int]) -> None:
    """Execute all packets. Raises ScheduleError with the head of each queue of a rank that is stuck.

    `queue_of`: (rank, packet) -> number of a hardware queue. Called once per packet, in the order of issue.
    """
    queues: list[dict[int, deque[int]]] = []
    for rank, issued in enumerate(ranks):
        by_queue: dict[int, deque[int]] = {}
        for index, packet in enumerate(issued):
            by_queue.setdefault(queue_of(rank, packet), deque()).append(index)
        queues.append(by_queue)
    ended: list[set[int]] = [set() for _ in ranks]
    arrived: dict[Event, dict[int, deque[int]]] = {}  # event -> rank -> the queue whose head is its packet
    runnable = set(range(len(ranks)))
    while runnable:
        rank = runnable.pop()
        for queue in queues[rank].values():
            while queue and ended[rank].issuperset(ranks[rank][queue[0]].after):
                event = ranks[rank][queue[0]].event
                if event is None:
                    ended[rank].add(queue.popleft())
                    runnable.add(rank)
                    continue
                at_head = arrived.setdefault(event, {})
                at_head[rank] = queue
                if len(at_head) < len(event[2]):
                    break
                for other, its_queue in arrived.pop(event).items():
                    ended[other].add(its_queue.popleft())
                    runnable.add(other)
    stuck = []
    for rank, by_queue in enumerate(queues):
        heads = [ranks[rank][queue[0]] for queue in by_queue.values() if queue]
        waits = [head.event[0] if head.event else f"a packet of {head.stream}" for head in heads]
        if waits:
            stuck.append(Problem(f"rank {rank}", f"deadlock: queues wait for {', '.join(waits)}"))
    if stuck:
        raise ScheduleError(stuck)
