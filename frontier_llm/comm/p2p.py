"""Pipeline messages between neighbouring virtual stages: static shapes, asynchronous sends, receives posted ahead of their use."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from frontier_llm.comm.axis import Axis


class Receive:
    """A posted receive; `wait()` returns the tensor."""

    def __init__(self, buffer: Tensor, work: Any) -> None:
        self._buffer, self._work = buffer, work

    def wait(self) -> Tensor:
        """The message, once it has arrived."""
        self._work.wait()
        return self._buffer


class Sends:
    """Sends under way; each keeps its tensor alive until it is done.

    A send completes when the peer's posted receive has taken it, so a rank must not wait for its sends before its next receive
    is posted; waiting for the oldest one only when `limit` are outstanding bounds the memory held (the schedule bounds it anyway).
    """

    def __init__(self) -> None:
        self._works: list[tuple[Any, Tensor]] = []

    def start(self, x: Tensor, channel: Axis, to: int) -> None:
        """Send to axis rank `to`."""
        channel.ledger.add(channel.name, "send", x.numel() * x.element_size())
        self._works.append((dist.isend(x, channel.ranks[to], group=channel.group), x))
        self._works = [(work, tensor) for work, tensor in self._works if not work.is_completed()]

    def wait_all(self) -> None:
        """Return when every send has been taken."""
        for work, _ in self._works:
            work.wait()
        self._works.clear()


def post_receive(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, channel: Axis, source: int) -> Receive:
    """Post a receive from axis rank `source`; it overlaps with whatever is computed until `wait()`."""
    buffer = torch.empty(shape, dtype=dtype, device=device)
    channel.ledger.add(channel.name, "recv", buffer.numel() * buffer.element_size())
    return Receive(buffer, dist.irecv(buffer, channel.ranks[source], group=channel.group))
