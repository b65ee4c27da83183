"""Simulates a network link of a given speed between the ranks of one machine. A transfer takes the link's time, and the
ranks may compute during it.

Shared memory moves bytes with the same cores that compute, so on one machine there is nothing to overlap. This module
wraps a process group. The group still transfers the bytes, but a result is available only when the link would have
delivered it. A rank that has to wait sleeps.

Each rank has one link per axis, and the link sends messages one after another. *Simulated*: there is no NIC, and axes
do not contend.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from frontier_llm.comm import Axis, Group, Mesh, Pending
from frontier_llm.comm.group import Sending


@dataclass(frozen=True)
class Link:
    """Bandwidth and latency of the simulated link."""

    bytes_s: float
    latency_s: float

    def seconds(self, size_bytes: float) -> float:
        """Return the transfer time in seconds, from the moment when both ends are ready."""
        return self.latency_s + size_bytes / self.bytes_s


class _Transfer:
    """Pending `work` whose result is available `seconds` after all its ranks were ready.

    `stamp` receives the time at which the other rank of a message, or the last rank of a collective, was ready.
    `stamped` is the pending transfer of `stamp`.
    """

    def __init__(self, work: Pending, stamp: Tensor, stamped: Pending, seconds: float) -> None:
        self._work = work
        self._stamp = stamp
        self._stamped = stamped
        self._seconds = seconds
        self._posted_s = time.monotonic()

    def wait(self) -> None:
        self._work.wait()
        self._stamped.wait()
        left_s = max(float(self._stamp), self._posted_s) + self._seconds - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class LinkedGroup:
    """A process group of `size` ranks with a simulated link."""

    def __init__(self, group: Group, size: int, link: Link) -> None:
        self._group = group
        self._size = size
        self._link = link
        self._free_s = 0.0

    def _collective(self, work: Pending, sent_bytes: float) -> Pending:
        seconds = self._link.seconds(sent_bytes)
        stamp = torch.tensor([max(time.monotonic(), self._free_s)], dtype=torch.float64)
        self._free_s = float(stamp) + seconds
        return _Transfer(work, stamp, self._group.start_all_reduce_(stamp, "max"), seconds)

    def _share(self, whole: Tensor) -> float:
        return whole.nbytes * (self._size - 1) / self._size

    def start_all_reduce_(self, x: Tensor, op: str) -> Pending:
        return self._collective(self._group.start_all_reduce_(x, op), 2 * self._share(x))

    def start_all_gather_into(self, gathered: Tensor, x: Tensor) -> Pending:
        return self._collective(self._group.start_all_gather_into(gathered, x), self._share(gathered))

    def start_reduce_scatter_into(self, scattered: Tensor, x: Tensor) -> Pending:
        return self._collective(self._group.start_reduce_scatter_into(scattered, x), self._share(x))

    def start_all_to_all_into(self, arriving: Tensor, x: Tensor) -> Pending:
        return self._collective(self._group.start_all_to_all_into(arriving, x), self._share(x))

    def start_all_to_all_rows_into(
        self, arriving: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        return self._collective(self._group.start_all_to_all_rows_into(arriving, x, received, sent), self._share(x))

    def start_broadcast_(self, x: Tensor, source: int) -> Pending:
        """Start the broadcast without a simulated delay, because a training step contains no broadcast."""
        return self._group.start_broadcast_(x, source)

    def start_barrier(self) -> Pending:
        """Start the barrier without a simulated delay."""
        return self._group.start_barrier()

    def send(self, x: Tensor, to: int) -> Sending:
        """A stamp with the sending time follows the message. The receiver waits for the link's time."""
        seconds = self._link.seconds(x.nbytes)
        begin_s = max(time.monotonic(), self._free_s)
        self._free_s = begin_s + seconds
        work = self._group.send(x, to)
        self._group.send(torch.tensor([begin_s], dtype=torch.float64), to).wait()
        return work

    def receive(self, buffer: Tensor, source: int) -> Pending:
        work = self._group.receive(buffer, source)
        stamp = torch.empty(1, dtype=torch.float64)
        return _Transfer(work, stamp, self._group.receive(stamp, source), self._link.seconds(buffer.nbytes))

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Pending:
        self.send(outgoing, to)
        return self.receive(incoming, source)


def linked(mesh: Mesh, link: Link) -> Mesh:
    """Return the mesh with a link on its tp, dp, ep and pipeline axes."""

    def slow(axis: Axis) -> Axis:
        return axis if axis.group is None else replace(axis, group=LinkedGroup(axis.group, axis.size, link))

    channels = {name: slow(axis) for name, axis in mesh.channels.items()}
    replicas = slow(mesh.replicas)
    return replace(
        mesh,
        tp=slow(mesh.tp),
        cp=slow(mesh.cp),
        dp=slow(mesh.dp),
        ep=slow(mesh.ep),
        replicas=replicas,
        channels=channels,
    )
