"""Pipeline messages between neighbouring virtual stages: static shapes, asynchronous sends, receives posted ahead of their use."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from frontier_llm.comm.axis import Axis
from frontier_llm.comm.collectives import Started
from frontier_llm.comm.group import Sending


class Receive:
    """A posted receive; `wait()` returns the tensor."""

    def __init__(self, buffer: Tensor, started: Started) -> None:
        self._buffer, self._started = buffer, started

    def wait(self) -> Tensor:
        """The message, once it has arrived."""
        self._started.wait()
        return self._buffer


class _Sent(NamedTuple):
    message: Tensor  # kept alive until it has been taken
    work: Sending
    started: Started


class Sends:
    """Sends under way, each keeping its tensor alive until the peer's posted receive has taken it; those are let go at the next send.

    At most `limit` per channel are outstanding; then the oldest is waited for. One is enough for every schedule to end
    (schedule.check with outstanding_sends=1).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._outstanding: dict[str, deque[_Sent]] = defaultdict(deque)

    def start(self, x: Tensor, channel: Axis, to: int) -> None:
        """Send a contiguous tensor to axis rank `to`."""
        assert channel.group is not None, "an axis of one rank has no one to send to"
        queue = self._outstanding[channel.name]
        while queue and (len(queue) >= self._limit or queue[0].work.is_done()):
            queue.popleft().started.wait()
        call = channel.ledger.add(channel.name, "send", x.nbytes)
        with channel.ledger.blocked(call, last=False):
            work = channel.group.send(x, to)
        queue.append(_Sent(x, work, Started(work, channel, call)))

    def wait_all(self) -> None:
        """Return when every send has been taken."""
        for queue in self._outstanding.values():
            while queue:
                queue.popleft().started.wait()


def post_receive(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, channel: Axis, source: int) -> Receive:
    """Post a receive from axis rank `source`; it overlaps with whatever is computed until `wait()`."""
    assert channel.group is not None, "an axis of one rank has no one to receive from"
    buffer = torch.empty(shape, dtype=dtype, device=device)
    call = channel.ledger.add(channel.name, "recv", buffer.nbytes)
    return Receive(buffer, Started(channel.group.receive(buffer, source), channel, call))


def first_messages(channel: str, stages: int) -> list[list[tuple[int, int]]]:
    """(sender, receiver) of every stream of a channel, in rounds in which no rank has two."""
    if channel.endswith("-wrap"):
        rounds = [[(stages - 1, 0)]]
    else:
        rounds = [[(stage, stage + 1) for stage in range(odd, stages - 1, 2)] for odd in (0, 1)]
    if channel.startswith("forward"):
        return rounds
    return [[(receiver, sender) for sender, receiver in pairs] for pairs in rounds]


def open_channels(channels: Mapping[str, Axis], device: torch.device) -> None:
    """Send one byte through every stream, so that no step has to open one. Collective over the pipeline.

    RCCL makes a pair's communicator at their first message, and there the *host* waits for the peer. Steps post receives ahead: with one
    microbatch a stage would wait for the gradient's sender before it has computed what that one waits for, whatever the schedule.
    """
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    for name, axis in channels.items():
        assert axis.group is not None, "an axis of one rank has no one to talk to"
        for sender, receiver in chain.from_iterable(first_messages(name, axis.size)):
            if axis.rank == sender:
                axis.group.send(byte, receiver).wait()
            elif axis.rank == receiver:
                axis.group.receive(byte, sender).wait()


def exchange(outgoing: Tensor, to: int, incoming: Tensor, source: int, axis: Axis) -> None:
    """Send to axis rank `to` and receive from axis rank `source` at the same time; both contiguous, counted as send and recv."""
    assert axis.group is not None, "an axis of one rank has no one to exchange with"
    sent = axis.ledger.add(axis.name, "send", outgoing.nbytes)
    received = axis.ledger.add(axis.name, "recv", incoming.nbytes)
    with axis.ledger.blocked(received):
        axis.group.exchange(outgoing, to, incoming, source).wait()
    sent.finished = True
