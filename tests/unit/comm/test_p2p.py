"""Pipeline messages under conditions of RCCL that the CPU's transports hide. The first use of a stream waits for the
host at its other end, and sends end late.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from frontier_llm.comm import Axis, Sends
from frontier_llm.schedule import Placement, Schedule, build, forward_only, posted_ahead

SCHEDULES = [
    (name, pp, m, 2 if name == "interleaved" else 1)
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved")
    for pp in (2, 3, 4, 8)
    for m in (1, 2, 2 * pp + 1)
]

Stream = tuple[str, int, int]  # (channel, sending stage, receiving stage)


def _calls(schedule: Schedule, stage: int) -> list[Stream]:
    """Return the streams that a stage's host uses, in its order."""
    used = []
    for kind, _, position in schedule.actions[stage]:
        if not kind.computes:
            first, second = sorted((stage, schedule.placement.peer(kind, position)))
            used.append((schedule.placement.channel(kind, position).value, first, second))
    return used


def _opening(placement: Placement, stage: int) -> list[Stream]:
    pairs = [(channel.value, pair) for channel, pairs in placement.streams.items() for pair in pairs]
    return [(name, min(pair), max(pair)) for name, pair in pairs if stage in pair]


def _meet(hosts: list[list[Stream]]) -> set[int]:
    """Return the stages whose hosts never finish, if the first use of a stream waits for the other end's first use."""
    queues = [list(reversed(calls)) for calls in hosts]
    opened = set[Stream]()
    while True:
        for queue in queues:
            while queue and queue[-1] in opened:
                queue.pop()
        heads = [queue[-1] for queue in queues if queue]
        meeting = {stream for stream in heads if heads.count(stream) == 2}
        if not meeting:
            return {stage for stage, queue in enumerate(queues) if queue}
        opened |= meeting


@pytest.mark.parametrize("name, pp, m, v", SCHEDULES)
def test_every_stream_is_opened_before_a_step_could_hang_on_it(name: str, pp: int, m: int, v: int) -> None:
    opening = [_opening(build(name, pp, m, v).placement, stage) for stage in range(pp)]
    assert not _meet(opening)
    for schedule in (build(name, pp, m, v), forward_only(build(name, pp, m, v))):
        for stage in range(pp):
            assert set(_calls(schedule, stage)) <= set(opening[stage])


@pytest.mark.parametrize("name, pp, m, v", SCHEDULES)
def test_streams_that_are_opened_by_use_meet_too(name: str, pp: int, m: int, v: int) -> None:
    """All hosts use the streams in one order, so no host waits for ever. This also holds if receives are posted as
    early as that order allows.
    """
    schedule = build(name, pp, m, v)
    ahead = replace(schedule, actions=tuple(tuple(posted_ahead(actions)) for actions in schedule.actions))
    assert not _meet([_calls(schedule, stage) for stage in range(pp)])
    assert not _meet([_calls(ahead, stage) for stage in range(pp)])


def test_a_host_that_uses_streams_in_an_order_of_its_own_never_meets_its_neighbour() -> None:
    schedule = build("1f1b", 2, 2)
    calls = [_calls(schedule, stage) for stage in range(2)]
    calls[1].reverse()
    assert _meet(calls) == {0, 1}


class _Late:
    """A send that completes when the test sets `taken`. `waited` records if a caller waited for it."""

    def __init__(self) -> None:
        self.taken = self.waited = False

    def wait(self) -> None:
        self.waited = True

    def is_done(self) -> bool:
        return self.taken


class _Channel:
    def __init__(self) -> None:
        self.works: list[_Late] = []

    def send(self, x: Tensor, to: int) -> _Late:
        self.works.append(_Late())
        return self.works[-1]


def test_a_send_that_is_done_lets_go_of_its_tensor_long_before_the_limit() -> None:
    """If a finished send kept its tensor, a limit of 130 messages, as for 64 stages, would hold 130 activations."""
    group = _Channel()
    sends = Sends(limit=130)
    axis = Axis("pp.forward", 0, 2, (0, 1), group)  # type: ignore[arg-type]
    held = []
    for _ in range(3):
        x = torch.zeros(8)
        held.append(weakref.ref(x))
        sends.start(x, axis, 1)
    del x
    assert all(reference() is not None for reference in held)
    group.works[0].taken = group.works[2].taken = True
    sends.start(torch.zeros(8), axis, 1)
    assert held[0]() is None
    assert held[1]() is not None and held[2]() is not None, (
        "a later one may be done before an earlier one; they are let go in order"
    )
    assert not group.works[1].waited


def test_at_the_limit_the_oldest_is_waited_for() -> None:
    group = _Channel()
    sends = Sends(limit=2)
    axis = Axis("pp.forward", 0, 2, (0, 1), group)  # type: ignore[arg-type]
    for _ in range(3):
        sends.start(torch.zeros(8), axis, 1)
    assert [work.waited for work in group.works] == [True, False, False]
    sends.wait_all()
    assert all(work.waited for work in group.works)
