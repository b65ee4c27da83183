"""Pipeline messages between neighbouring virtual stages: static shapes, asynchronous sends, receives posted ahead of their use."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from frontier_llm.comm.axis import Axis


class Receive:
    """A posted receive; `wait()` returns the tensor."""

    def __init__(self, buffer: Tensor, work: Any, channel: Axis) -> None:
        self._buffer, self._work, self._channel = buffer, work, channel

    def wait(self) -> Tensor:
        """The message, once it has arrived."""
        self._channel.ledger.wait(self._channel.name, "recv", self._work)
        return self._buffer


class Sends:
    """Sends under way, each keeping its tensor alive until the peer's posted receive has taken it.

    At most `limit` per channel are outstanding; then the oldest is waited for. The limit must exceed the number of messages by
    which a schedule lets a receiver lag behind, or both sides would wait for each other; the engine sets it from the schedule.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._outstanding: dict[str, deque[tuple[Any, Tensor]]] = defaultdict(deque)

    def start(self, x: Tensor, channel: Axis, to: int) -> None:
        """Send a contiguous tensor to axis rank `to`."""
        queue = self._outstanding[channel.name]
        if len(queue) >= self._limit:
            channel.ledger.wait(channel.name, "send", queue.popleft()[0])
        channel.ledger.add(channel.name, "send", x.numel() * x.element_size())
        queue.append((dist.isend(x, channel.ranks[to], group=channel.group), x))

    def wait_all(self) -> None:
        """Return when every send has been taken."""
        for queue in self._outstanding.values():
            for work, _ in queue:
                work.wait()
            queue.clear()


def post_receive(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, channel: Axis, source: int) -> Receive:
    """Post a receive from axis rank `source`; it overlaps with whatever is computed until `wait()`."""
    buffer = torch.empty(shape, dtype=dtype, device=device)
    channel.ledger.add(channel.name, "recv", buffer.numel() * buffer.element_size())
    return Receive(buffer, dist.irecv(buffer, channel.ranks[source], group=channel.group), channel)
