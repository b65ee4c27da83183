"""Pipeline messages between neighbouring virtual stages.

Shapes are static, sends are asynchronous, and receives are posted before their messages are needed.
"""

from __future__ import annotations

from collections import defaultdict, deque

import torch
from torch import Tensor

from frontier_llm.comm.axis import Axis, Started


class Receive:
    """A posted receive of a pipeline message. `wait()` returns the tensor."""

    def __init__(self, buffer: Tensor, started: Started) -> None:
        self._buffer = buffer
        self._started = started

    def wait(self) -> Tensor:
        """Wait for the message and return its tensor."""
        self._started.wait()
        return self._buffer


class Sends:
    """Running sends of a rank. Each send keeps its tensor alive until the peer's posted receive has taken the message.

    The next send on the channel releases finished sends. At most `limit` sends per channel are unfinished. A further
    send first waits for the oldest unfinished send. No limit can cause a deadlock, because all ranks follow one order
    of communication (schedule/order.py).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._outstanding: dict[str, deque[Started]] = defaultdict(deque)

    def start(self, x: Tensor, channel: Axis, to: int) -> None:
        """Send a contiguous tensor to axis rank `to`."""
        group = channel.group
        assert group is not None, "an axis of one rank has no peer to send to"
        queue = self._outstanding[channel.name]
        while queue and (len(queue) >= self._limit or queue[0].is_done()):
            queue.popleft().wait()
        queue.append(Started(channel, "send", x.nbytes, lambda: group.send(x, to)))

    def wait_all(self) -> None:
        """Wait until the peers have taken all messages."""
        for queue in self._outstanding.values():
            while queue:
                queue.popleft().wait()


def post_receive(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, channel: Axis, source: int
) -> Receive:
    """Post a receive from axis rank `source`. The transfer overlaps with the compute until `wait()`."""
    group = channel.group
    buffer = torch.empty(shape, dtype=dtype, device=device)
    assert group is not None, "an axis of one rank has no peer to receive from"
    return Receive(buffer, Started(channel, "recv", buffer.nbytes, lambda: group.receive(buffer, source)))
