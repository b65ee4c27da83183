"""Collectives along an axis: each is the identity on an axis of size 1, and each is counted in the axis' ledger."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from frontier_llm.comm.axis import Axis
from frontier_llm.comm.group import DONE, Collectives, Pending
from frontier_llm.comm.ledger import Call


class Started:
    """A collective or message under way; waiting is timed in the axis' ledger."""

    def __init__(self, work: Pending, axis: Axis, call: Call) -> None:
        self._work, self._axis, self._call = work, axis, call

    def wait(self) -> None:
        """See Pending."""
        if self._call.finished:
            return
        with self._axis.ledger.blocked(self._call):
            self._work.wait()


def _start(axis: Axis, operation: str, size_bytes: int, start: Callable[[Collectives], Pending]) -> Pending:
    """Count a collective and begin it. Some transports do their work in the start, others while they are waited for: both are timed."""
    if (group := axis.collectives(operation, size_bytes)) is None:
        return DONE
    call = axis.ledger.add(axis.name, operation, size_bytes)
    with axis.ledger.blocked(call, last=False):
        work = start(group)
    return Started(work, axis, call)


def all_reduce_(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce in place over the axis; returns x."""
    start_all_reduce_(x, axis, op).wait()
    return x


def start_all_reduce_(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Begin an in-place all-reduce of a contiguous tensor."""
    return _start(axis, "all_reduce", x.nbytes, lambda group: group.start_all_reduce_(x, op))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[n, …] on each rank → [n * size, …], concatenated along dim 0 in axis order."""
    gathered, pending = start_all_gather(x, axis)
    pending.wait()
    return gathered


def start_all_gather(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Begin an all-gather along dim 0; the result may be read after wait()."""
    if axis.group is None:
        return x, DONE
    gathered = torch.empty((axis.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    return gathered, start_all_gather_into(gathered, x.contiguous(), axis)


def start_all_gather_into(gathered: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Begin an all-gather into a given buffer; `x` may be this rank's part of `gathered` itself."""
    return _start(axis, "all_gather", gathered.nbytes, lambda group: group.start_all_gather_into(gathered, x))


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[n * size, …] partial sums → this rank's summed [n, …] along dim 0."""
    scattered, pending = start_reduce_scatter(x, axis)
    pending.wait()
    return scattered


def start_reduce_scatter(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Begin a summing reduce-scatter along dim 0; the result may be read after wait()."""
    if axis.group is None:
        return x, DONE
    scattered = torch.empty((x.shape[0] // axis.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return scattered, start_reduce_scatter_into(scattered, x.contiguous(), axis)


def start_reduce_scatter_into(scattered: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Begin a summing reduce-scatter into a given buffer; it may be this rank's part of `x` itself."""
    return _start(axis, "reduce_scatter", x.nbytes, lambda group: group.start_reduce_scatter_into(scattered, x))


def start_all_to_all_into(arriving: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Begin to send part r of `x` to axis rank r and to receive part r of `arriving` from it; two different buffers of one shape."""
    return _start(axis, "all_to_all", x.nbytes, lambda group: group.start_all_to_all_into(arriving, x))


def broadcast_(x: Tensor, axis: Axis, source: int) -> Tensor:
    """Copy `x` of axis rank `source` to all; returns x."""
    if (group := axis.collectives("broadcast", x.nbytes)) is not None:
        with axis.ledger.blocked(axis.ledger.add(axis.name, "broadcast", x.nbytes)):
            group.broadcast_(x, source)
    return x


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    if axis.group is not None:
        with axis.ledger.blocked(axis.ledger.add(axis.name, "barrier", 0)):
            axis.group.barrier()
