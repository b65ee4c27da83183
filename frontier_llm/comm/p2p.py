"""Pipeline messages between neighbouring virtual stages: static shapes, asynchronous sends, receives posted ahead of their use."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

import torch
from torch import Tensor

from frontier_llm.comm.axis import Axis
from frontier_llm.comm.group import Pending, Sending
from frontier_llm.comm.ledger import Call, Ledger


class Receive:
    """A posted receive; `wait()` returns the tensor."""

    def __init__(self, buffer: Tensor, work: Pending, ledger: Ledger, call: Call) -> None:
        self._buffer, self._work, self._ledger, self._call = buffer, work, ledger, call

    def wait(self) -> Tensor:
        """The message, once it has arrived."""
        if not self._call.finished:
            with self._ledger.blocked(self._call):
                self._work.wait()
        return self._buffer


class Sends:
    """Sends under way, each keeping its tensor alive until the peer's posted receive has taken it; those are let go at the next send.

    At most `limit` per channel are outstanding; then the oldest is waited for. The limit must exceed the number of messages by
    which a schedule lets a receiver lag behind, or both sides would wait for each other.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._outstanding: dict[str, deque[tuple[Sending, Tensor, Ledger, Call]]] = defaultdict(deque)

    def start(self, x: Tensor, channel: Axis, to: int) -> None:
        """Send a contiguous tensor to axis rank `to`."""
        assert channel.group is not None, "an axis of one rank has no one to send to"
        queue = self._outstanding[channel.name]
        while queue and (len(queue) >= self._limit or queue[0][0].is_done()):
            self._finish(*queue.popleft())
        call = channel.ledger.add(channel.name, "send", x.numel() * x.element_size())
        with channel.ledger.blocked(call, last=False):
            work = channel.group.send(x, to)
        queue.append((work, x, channel.ledger, call))

    def wait_all(self) -> None:
        """Return when every send has been taken."""
        for queue in self._outstanding.values():
            while queue:
                self._finish(*queue.popleft())

    @staticmethod
    def _finish(work: Sending, _: Tensor, ledger: Ledger, call: Call) -> None:
        with ledger.blocked(call):
            work.wait()


def post_receive(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, channel: Axis, source: int) -> Receive:
    """Post a receive from axis rank `source`; it overlaps with whatever is computed until `wait()`."""
    assert channel.group is not None, "an axis of one rank has no one to receive from"
    buffer = torch.empty(shape, dtype=dtype, device=device)
    call = channel.ledger.add(channel.name, "recv", buffer.numel() * buffer.element_size())
    return Receive(buffer, channel.group.receive(buffer, source), channel.ledger, call)


def first_messages(channel: str, stages: int) -> list[list[tuple[int, int]]]:
    """(sender, receiver) of every stream of a channel, in rounds in which no rank has two."""
    boundaries = [[(stages - 1, 0)]] if channel.endswith("-wrap") else [[(i, i + 1) for i in range(odd, stages - 1, 2)] for odd in (0, 1)]
    onward = channel.startswith("forward")
    return [[pair if onward else pair[::-1] for pair in pairs] for pairs in boundaries]


def open_channels(channels: Mapping[str, Axis], device: torch.device) -> None:
    """Send one byte through every stream, so that no step has to open one. Collective over the pipeline.

    RCCL makes a pair's communicator at their first message, and there the *host* waits for the peer. Steps post receives ahead: with one
    microbatch a stage would wait for the gradient's sender before it has computed what that one waits for, whatever the schedule.
    """
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    for name, axis in channels.items():
        assert axis.group is not None, "an axis of one rank has no one to talk to"
        for pairs in first_messages(name, axis.size):
            for sender, receiver in pairs:
                if axis.rank == sender:
                    axis.group.send(byte, receiver).wait()
                elif axis.rank == receiver:
                    axis.group.receive(byte, sender).wait()


def exchange(outgoing: Tensor, to: int, incoming: Tensor, source: int, axis: Axis) -> None:
    """Send to axis rank `to` and receive from axis rank `source` at the same time; both contiguous, counted as send and recv."""
    assert axis.group is not None, "an axis of one rank has no one to exchange with"
    sent = axis.ledger.add(axis.name, "send", outgoing.numel() * outgoing.element_size())
    received = axis.ledger.add(axis.name, "recv", incoming.numel() * incoming.element_size())
    with axis.ledger.blocked(received):
        axis.group.exchange(outgoing, to, incoming, source).wait()
    sent.finished = True
