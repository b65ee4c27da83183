"""Group: what moves bytes among the ranks of an axis. One face, three ways: torch.distributed, shared memory, hierarchical."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames these and warns at every call of the old names; 2.10 has only those
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Pending(Protocol):
    """A collective or message under way. Its tensors stay alive and must not be written to until wait() has returned."""

    def wait(self) -> Any:
        """Block (on CPU) or make the current stream wait (on a GPU) until the result may be used."""


class _Done:
    def wait(self) -> None:
        """Nothing was started."""


DONE: Pending = _Done()


class All:
    """Several under way as one."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Wait for each."""
        for part in self._parts:
            part.wait()


def _under_way(work: dist.Work | None) -> Pending:
    assert work is not None, "torch gives no work to processes outside the group"
    return work


class Collectives(Protocol):
    """Collectives among `size` > 1 ranks; all tensors contiguous, sources are ranks of the axis."""

    def start_all_reduce_(self, x: Tensor, op: str) -> Pending:
        """'sum' or 'max' over all ranks, in place."""

    def start_all_gather_into(self, gathered: Tensor, x: Tensor) -> Pending:
        """`x` of every rank, in axis order; `x` may be this rank's part of `gathered`."""

    def start_reduce_scatter_into(self, scattered: Tensor, x: Tensor) -> Pending:
        """This rank's part of the sum; `scattered` may be this rank's part of `x`."""

    def broadcast_(self, x: Tensor, source: int) -> None:
        """`x` of rank `source`, in place."""

    def barrier(self) -> None:
        """Return when every rank is here."""


class Group(Collectives, Protocol):
    """Collectives and messages among `size` > 1 ranks."""

    def send(self, x: Tensor, to: int) -> Pending:
        """A message; messages to one rank arrive in order."""

    def receive(self, buffer: Tensor, source: int) -> Pending:
        """Post a receive; those from one rank are filled in the order in which they were posted."""

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Pending:
        """Send to one rank and receive from another (or the same) as one operation: two would wait for each other on a GPU's stream."""


class TorchGroup:
    """A process group of torch.distributed: RCCL or NCCL on GPUs, gloo on CPUs that do not share a host."""

    def __init__(self, process_group: Any, ranks: tuple[int, ...]) -> None:
        self.process_group, self._ranks = process_group, ranks

    def start_all_reduce_(self, x: Tensor, op: str) -> Pending:
        """See Group."""
        return dist.all_reduce(x, op=_OPS[op], group=self.process_group, async_op=True)

    def start_all_gather_into(self, gathered: Tensor, x: Tensor) -> Pending:
        """See Group."""
        return _all_gather(gathered, x, group=self.process_group, async_op=True)

    def start_reduce_scatter_into(self, scattered: Tensor, x: Tensor) -> Pending:
        """See Group."""
        return _reduce_scatter(scattered, x, op=dist.ReduceOp.SUM, group=self.process_group, async_op=True)

    def broadcast_(self, x: Tensor, source: int) -> None:
        """See Group."""
        dist.broadcast(x, src=self._ranks[source], group=self.process_group)

    def barrier(self) -> None:
        """See Group."""
        dist.barrier(group=self.process_group)

    def send(self, x: Tensor, to: int) -> Pending:
        """See Group."""
        return _under_way(dist.isend(x, self._ranks[to], group=self.process_group))

    def receive(self, buffer: Tensor, source: int) -> Pending:
        """See Group."""
        return _under_way(dist.irecv(buffer, self._ranks[source], group=self.process_group))

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Pending:
        """See Group."""
        operations = [
            dist.P2POp(dist.isend, outgoing, self._ranks[to], self.process_group),
            dist.P2POp(dist.irecv, incoming, self._ranks[source], self.process_group),
        ]
        return All(dist.batch_isend_irecv(operations))
