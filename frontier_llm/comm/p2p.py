"""Pipeline messages between neighbouring virtual stages: static shapes, asynchronous sends, receives posted ahead of their use."""

from __future__ import annotations

from collections import defaultdict, deque

import torch
from torch import Tensor

from frontier_llm.comm.axis import Axis
from frontier_llm.comm.group import Pending
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
    """Sends under way, each keeping its tensor alive until the peer's posted receive has taken it.

    At most `limit` per channel are outstanding; then the oldest is waited for. One is enough for every schedule to end
    (schedule.check with outstanding_sends=1).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._outstanding: dict[str, deque[tuple[Pending, Tensor, Ledger, Call]]] = defaultdict(deque)

    def start(self, x: Tensor, channel: Axis, to: int) -> None:
        """Send a contiguous tensor to axis rank `to`."""
        assert channel.group is not None, "an axis of one rank has no one to send to"
        queue = self._outstanding[channel.name]
        if len(queue) >= self._limit:
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
    def _finish(work: Pending, _: Tensor, ledger: Ledger, call: Call) -> None:
        with ledger.blocked(call):
            work.wait()


def post_receive(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, channel: Axis, source: int) -> Receive:
    """Post a receive from axis rank `source`; it overlaps with whatever is computed until `wait()`."""
    assert channel.group is not None, "an axis of one rank has no one to receive from"
    buffer = torch.empty(shape, dtype=dtype, device=device)
    call = channel.ledger.add(channel.name, "recv", buffer.numel() * buffer.element_size())
    return Receive(buffer, channel.group.receive(buffer, source), channel.ledger, call)


def exchange(outgoing: Tensor, to: int, incoming: Tensor, source: int, axis: Axis) -> None:
    """Send to axis rank `to` and receive from axis rank `source` at the same time; both contiguous, counted as send and recv."""
    assert axis.group is not None, "an axis of one rank has no one to exchange with"
    sent = axis.ledger.add(axis.name, "send", outgoing.numel() * outgoing.element_size())
    received = axis.ledger.add(axis.name, "recv", incoming.numel() * incoming.element_size())
    with axis.ledger.blocked(received):
        axis.group.exchange(outgoing, to, incoming, source).wait()
    sent.finished = True
