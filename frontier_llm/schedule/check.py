"""Is a schedule legal? Counts, dependencies, and a dry run over FIFO channels with rendezvous; and how much it keeps alive."""

from __future__ import annotations

from collections import Counter, deque

from frontier_llm.errors import FrontierError, Problem
from frontier_llm.schedule.actions import FORWARD_ONLY, Action, Kind, Schedule
from frontier_llm.schedule.channels import Channel, channel_of, chunk_at_peer, peer_of, received_by, sent_by

_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


class ScheduleError(FrontierError):
    """A schedule that cannot be played, or that would compute the wrong thing."""


def check(schedule: Schedule, outstanding_sends: int | None = None) -> None:
    """Raise ScheduleError unless the schedule is legal.

    Legal: every stage runs forward and backward (B, or I and later W) of each microbatch and chunk exactly once and in that
    order; each message is sent once, after the compute that makes it, and its receive is posted before the compute that needs it;
    and a dry run ends in which every rank's four channels are independent streams, started strictly in issue order, and a
    transfer happens only when both ends have it at the head of their stream (rendezvous, no buffering).
    Sends do not block compute; with `outstanding_sends` they do as soon as that many of one channel are not taken. An evaluation
    (build.forward_only) must have the forwards alone.
    """
    if len(schedule.actions) != schedule.stages:
        raise ScheduleError(f"{len(schedule.actions)} lists of actions for {schedule.stages} stages")
    problems = [problem for stage in range(schedule.stages) for problem in _stage_problems(schedule, stage)]
    if problems:
        raise ScheduleError(problems)
    _dry_run(schedule, outstanding_sends)


def in_flight(schedule: Schedule, stage: int) -> int:
    """Peak number of (microbatch, chunk) activations that a stage keeps, from F to B, or to W where backward is split."""
    alive = peak = 0
    for action in schedule.actions[stage]:
        if action.kind is Kind.FORWARD:
            alive += 1
            peak = max(peak, alive)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            alive -= 1
    return peak


def pending_receives(schedule: Schedule, stage: int) -> int:
    """Peak number of receives of one kind that are posted and not yet consumed: the receive buffers a stage needs per direction."""
    peak, pending = 0, Counter[Kind]()
    for action in schedule.actions[stage]:
        if action.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
            pending[action.kind] += 1
            peak = max(peak, pending[action.kind])
        elif action.kind.computes:
            needs = received_by(action, stage, schedule.stages, schedule.chunks)
            if needs:
                pending[needs] -= 1
    return peak


def _stage_problems(schedule: Schedule, stage: int) -> list[Problem]:
    """What is wrong with one stage's list, seen alone."""
    where, problems = f"stage {stage}", []
    counts = Counter(schedule.actions[stage])
    problems += [Problem(where, f"{action} occurs {times} times", "once each") for action, times in counts.items() if times > 1]
    work = [(microbatch, chunk) for microbatch in range(schedule.microbatches) for chunk in range(schedule.chunks)]
    expected: set[Action] = set()
    for microbatch, chunk in work:
        split = Action(Kind.BACKWARD_INPUT, microbatch, chunk) in counts or Action(Kind.BACKWARD_WEIGHT, microbatch, chunk) in counts
        backward = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if split else (Kind.BACKWARD,)
        for kind in (Kind.FORWARD, *(backward if schedule.name != FORWARD_ONLY else ())):
            action = Action(kind, microbatch, chunk)
            messages = (rule(action, stage, schedule.stages, schedule.chunks) for rule in (received_by, sent_by))
            expected |= {action, *(Action(message, microbatch, chunk) for message in messages if message)}
    problems += [Problem(where, f"{action} is missing") for action in sorted(expected - set(counts), key=str)]
    problems += [Problem(where, f"{action} does not belong here") for action in sorted(set(counts) - expected, key=str)]
    return problems or _order_problems(schedule, stage)


def _order_problems(schedule: Schedule, stage: int) -> list[Problem]:
    """Each compute action after what it needs on its own stage; each message after the compute that makes it."""
    place = {action: index for index, action in enumerate(schedule.actions[stage])}
    problems = []
    for action in schedule.actions[stage]:
        microbatch, chunk = action.microbatch, action.chunk
        before: list[Action] = []
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            before.append(Action(Kind.FORWARD, microbatch, chunk))
        if action.kind is Kind.BACKWARD_WEIGHT:
            before.append(Action(Kind.BACKWARD_INPUT, microbatch, chunk))
        if action.kind is Kind.SEND_FORWARD:
            before.append(Action(Kind.FORWARD, microbatch, chunk))
        if action.kind is Kind.SEND_BACKWARD:
            whole = Action(Kind.BACKWARD, microbatch, chunk)
            before.append(whole if whole in place else Action(Kind.BACKWARD_INPUT, microbatch, chunk))
        needs = received_by(action, stage, schedule.stages, schedule.chunks) if action.kind.computes else None
        if needs:
            before.append(Action(needs, microbatch, chunk))
        problems += [Problem(f"stage {stage}", f"{action} comes before {first}") for first in before if place[first] > place[action]]
    return problems


class _DryRun:
    """Every rank's list played without time: which rank stands where, and what waits at the head of which stream."""

    def __init__(self, schedule: Schedule, outstanding_sends: int | None) -> None:
        self.schedule, self.outstanding_sends = schedule, outstanding_sends
        self.position = [0] * schedule.stages
        self.streams: list[dict[Channel, deque[Action]]] = [{channel: deque() for channel in Channel} for _ in schedule.actions]
        self.received: list[set[Action]] = [set() for _ in schedule.actions]
        self.computed: list[set[Action]] = [set() for _ in schedule.actions]

    def waits_for(self, stage: int, action: Action) -> Action | None:
        """What keeps a compute action from starting: its receive, or the neighbouring chunk on the same rank."""
        stages, chunks = self.schedule.stages, self.schedule.chunks
        needs = received_by(action, stage, stages, chunks)
        if needs:
            receive = Action(needs, action.microbatch, action.chunk)
            return None if receive in self.received[stage] else receive
        if stages == 1 and action.kind is not Kind.BACKWARD_WEIGHT:
            forward = action.kind is Kind.FORWARD
            neighbour = action.chunk - 1 if forward else action.chunk + 1
            made_by = Action(action.kind, action.microbatch, neighbour)
            return None if not 0 <= neighbour < chunks or made_by in self.computed[stage] else made_by
        return None

    def obstacle(self, stage: int, action: Action) -> str:
        """What a stuck action waits for, in words."""
        return str(self.waits_for(stage, action)) if action.kind.computes else "earlier sends to be taken"

    def advance(self, stage: int) -> set[int]:
        """Play one rank until it waits; returns the stages that this may have freed."""
        actions, freed = self.schedule.actions[stage], set()
        while self.position[stage] < len(actions):
            action = actions[self.position[stage]]
            if action.kind.computes:
                if self.waits_for(stage, action):
                    break
                self.computed[stage].add(action)
            else:
                stream = self.streams[stage][channel_of(action.kind, stage, self.schedule.stages)]
                if action.kind in _SENDS and sum(waiting.kind in _SENDS for waiting in stream) == self.outstanding_sends:
                    break
                stream.append(action)
                freed |= self.transfer(stage, action.kind)
            self.position[stage] += 1
        return freed

    def transfer(self, stage: int, kind: Kind) -> set[int]:
        """Complete what has met on the channel of `kind`, and what that lets through on the same channel further along."""
        stages = self.schedule.stages
        channel = channel_of(kind, stage, stages)
        freed, ends = set(), [stage]
        while ends:
            end = ends.pop()
            stream = self.streams[end][channel]
            if not stream:
                continue
            head = stream[0]
            peer = peer_of(head.kind, end, stages)
            if not self.streams[peer][channel]:
                continue
            other = self.streams[peer][channel][0]
            if (head.kind in _SENDS) == (other.kind in _SENDS) or peer_of(other.kind, peer, stages) != end:
                continue  # the peer is still busy with its other neighbour
            if (other.microbatch, other.chunk) != (head.microbatch, chunk_at_peer(head.kind, end, head.chunk, stages)):
                raise ScheduleError(f"stage {end} has {head} where stage {peer} has {other} on the {channel.value} channel")
            for side, done in ((end, stream.popleft()), (peer, self.streams[peer][channel].popleft())):
                freed.add(side)
                if done.kind not in _SENDS:
                    self.received[side].add(done)
            ends += [end, peer]
        return freed


def _dry_run(schedule: Schedule, outstanding_sends: int | None) -> None:
    run = _DryRun(schedule, outstanding_sends)
    runnable = set(range(schedule.stages))
    while runnable:
        runnable |= run.advance(runnable.pop())
    stuck = [stage for stage in range(schedule.stages) if run.position[stage] < len(schedule.actions[stage])]
    if stuck:
        actions = {stage: schedule.actions[stage][run.position[stage]] for stage in stuck}
        raise ScheduleError(
            [Problem(f"stage {stage}", f"deadlock: {action} waits for {run.obstacle(stage, action)}") for stage, action in actions.items()]
        )
