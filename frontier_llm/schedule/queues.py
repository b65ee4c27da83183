"""Would a schedule hang on a GPU whose streams share hardware queues? A dry run of what the engine enqueues there.

The host runs ahead and only enqueues; the order of execution is the device's. HIP maps all streams of one priority onto at most
GPU_MAX_HW_QUEUES hardware queues (default 4), and each packet of a queue waits for the one before it, whichever stream it is from
(ROCm/rocm-systems#8916). A receive that is posted ahead spins until its message comes: whatever shares its queue waits behind it,
and that may be the very work that the sender waits for. RCCL on gfx90a is known to hang in this way with three communicators
(ROCm/rccl#2191). With a queue for each communicator's stream nothing can wait behind a stranger, and the schedule ends if it ends at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from frontier_llm.errors import Problem
from frontier_llm.schedule.actions import Action, Kind, Schedule
from frontier_llm.schedule.channels import channel_of, chunk_at_peer, peer_of, received_by
from frontier_llm.schedule.check import ScheduleError

COMPUTE = "compute"
COLLECTIVES = ("world", "tp", "dp", "tied")  # one communicator each, and each its stream, in the order of their first use
_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


@dataclass(frozen=True)
class _Packet:
    """Work on a stream: it runs when those before it in its queue and those in `after` are done, and ends when all `parties` meet."""

    stream: str
    after: tuple[int, ...]  # positions in the same stage's list
    meeting: tuple
    parties: int
    what: str


def communication_streams(stages: int, chunks: int, two_stage: tuple[str, ...] = ()) -> int:
    """Streams that a pipeline rank communicates on, at most: the collectives', and per direction one for each neighbour.

    torch gives each pair of ranks in a group a communicator and a stream of its own. Ends have a wrap-around instead of a neighbour.
    An axis of `two_stage` has three streams (comm/hierarchical.py): its own, its nodes' and its rails'.
    """
    neighbours = 0 if stages == 1 else min(2, stages - 1) + (stages == 2 and chunks > 1)
    return len(COLLECTIVES) + 2 * len(two_stage) + 2 * neighbours


def check_queues(schedule: Schedule, queues: int, apart: bool = True, two_stage: tuple[str, ...] = ()) -> None:
    """Raise ScheduleError, naming what each stage hangs at, unless the schedule ends on devices with so many hardware queues.

    `queues` serve the communication streams, in turn as HIP deals them out; the compute stream has one of its own, as streams of
    another priority do, or with `apart=False` is dealt one like the others. Collectives of the axes in `two_stage` go inside nodes, then
    across. Tensor- and data-parallel peers play the same list, so a collective among them is taken to meet.
    """
    packets = [_enqueue(schedule, stage, two_stage) for stage in range(schedule.stages)]
    lines = [_deal(listed, queues, apart) for listed in packets]
    done: list[set[int]] = [set() for _ in packets]
    moved = True
    while moved:
        moved = False
        waiting: dict[tuple, list[tuple[int, deque[int]]]] = defaultdict(list)  # (stage, queue) of those ready to meet
        for stage, line in enumerate(lines):
            for queue in filter(None, line):
                packet = packets[stage][queue[0]]
                if done[stage].issuperset(packet.after):
                    waiting[packet.meeting].append((stage, queue))
        for met in waiting.values():
            stage, queue = met[0]
            if len(met) == packets[stage][queue[0]].parties:
                for stage, queue in met:
                    done[stage].add(queue.popleft())
                moved = True
    stuck = {stage for stage, listed in enumerate(packets) if len(done[stage]) < len(listed)}
    if stuck:
        raise ScheduleError([_hang(stage, packets[stage], done[stage], queues) for stage in sorted(stuck)])


def _hang(stage: int, packets: list[_Packet], done: set[int], queues: int) -> Problem:
    first = next(packet for index, packet in enumerate(packets) if index not in done)
    what = f"hangs at {first.what} on stream {first.stream} with {queues} hardware queues"
    return Problem(f"stage {stage}", what, "raise GPU_MAX_HW_QUEUES to the number of communication streams")


def _deal(packets: list[_Packet], queues: int, apart: bool) -> list[deque[int]]:
    """Streams get queues in turn, in the order of their first use; a queue holds positions of packets in issue order."""
    queue_of: dict[str, int] = {COMPUTE: -1} if apart else {}
    line: dict[int, deque[int]] = defaultdict(deque)
    for index, packet in enumerate(packets):
        if packet.stream not in queue_of:
            queue_of[packet.stream] = (len(queue_of) - apart) % queues
        line[queue_of[packet.stream]].append(index)
    return list(line.values())


def _enqueue(schedule: Schedule, stage: int, two_stage: tuple[str, ...]) -> list[_Packet]:
    """What one rank's host enqueues in a step: the schedule's actions, a tp collective inside each, dp's and world's at the end."""
    made: list[_Packet] = []
    last_compute: tuple[int, ...] = ()
    index_of: dict[Action, int] = {}

    def add(stream: str, after: tuple[int, ...], what: str, meeting: tuple | None = None, parties: int = 1) -> int:
        made.append(_Packet(stream, after, meeting or (stage, len(made)), parties, what))
        return len(made) - 1

    def collective(axis: str, after: tuple[int, ...], what: str, meeting: tuple | None = None, parties: int = 1) -> tuple[int, ...]:
        for part in (f"{axis} inside nodes", f"{axis} across nodes") if axis in two_stage else ():
            after = (add(part, after, what, meeting and (*meeting, part), parties),)
        return (add(axis, after, what, meeting, parties),)

    collective("world", (), "the barrier before the first step", ("barrier",), schedule.stages)
    last_of = Counter(action.chunk for action in schedule.actions[stage] if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
    for action in schedule.actions[stage]:
        if not action.kind.computes:
            stream, meeting = _message(schedule, stage, action)
            # torch makes every call wait for what the compute stream holds by then
            index_of[action] = add(stream, last_compute, str(action), meeting, 2)
            continue
        needs = received_by(action, stage, schedule.stages, schedule.chunks)
        after = last_compute + ((index_of[Action(needs, action.microbatch, action.chunk)],) if needs else ())
        first = add(COMPUTE, after, str(action))
        met = collective("tp", (first,), f"{action}'s tp collective")
        last_compute = (add(COMPUTE, met, str(action)),)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            last_of[action.chunk] -= 1
            if last_of[action.chunk] == 0:
                collective("dp", last_compute, f"the gradient sum of chunk {action.chunk}")
    if stage in (0, schedule.stages - 1) and schedule.stages > 1:
        last_compute = collective("tied", last_compute, "the tied embedding's sum", ("tied",), 2)
    collective("world", last_compute, "the gradient norm", ("norm",), schedule.stages)
    return made


def _message(schedule: Schedule, stage: int, action: Action) -> tuple[str, tuple]:
    """(stream, meeting) of a send or receive; both ends name the meeting after the sender's side."""
    stages, kind = schedule.stages, action.kind
    peer, channel = peer_of(kind, stage, stages), channel_of(kind, stage, stages)
    sender, chunk = (stage, action.chunk) if kind in _SENDS else (peer, chunk_at_peer(kind, stage, action.chunk, stages))
    return f"{channel.value} {min(stage, peer)}:{max(stage, peer)}", (channel, sender, action.microbatch, chunk)
