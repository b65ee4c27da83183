"""Collectives along an axis: each is the identity on an axis of size 1, and each is counted in the axis' ledger."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from frontier_llm.comm.axis import Axis

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Block (on CPU) or make the current stream wait (on a GPU) until the result may be used."""


class _Done:
    def wait(self) -> None:
        """Nothing was started."""


DONE: Pending = _Done()


class _Started:
    """A collective under way; waiting is timed in the axis' ledger."""

    def __init__(self, work: Any, axis: Axis, operation: str) -> None:
        self._work, self._axis, self._operation = work, axis, operation

    def wait(self) -> None:
        self._axis.ledger.wait(self._axis.name, self._operation, self._work)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def all_reduce_(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce in place over the axis; returns x."""
    start_all_reduce_(x, axis, op).wait()
    return x


def start_all_reduce_(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Begin an in-place all-reduce of a contiguous tensor."""
    if axis.size == 1:
        return DONE
    axis.ledger.add(axis.name, "all_reduce", _bytes(x))
    return _Started(dist.all_reduce(x, op=_OPS[op], group=axis.group, async_op=True), axis, "all_reduce")


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[n, …] on each rank → [n * size, …], concatenated along dim 0 in axis order."""
    gathered, pending = start_all_gather(x, axis)
    pending.wait()
    return gathered


def start_all_gather(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Begin an all-gather along dim 0; the result may be read after wait()."""
    if axis.size == 1:
        return x, DONE
    gathered = torch.empty((axis.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    return gathered, start_all_gather_into(gathered, x.contiguous(), axis)


def start_all_gather_into(gathered: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Begin an all-gather into a given buffer; `x` may be this rank's part of `gathered` itself."""
    if axis.size == 1:
        return DONE
    axis.ledger.add(axis.name, "all_gather", _bytes(gathered))
    return _Started(dist.all_gather_into_tensor(gathered, x, group=axis.group, async_op=True), axis, "all_gather")


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[n * size, …] partial sums → this rank's summed [n, …] along dim 0."""
    scattered, pending = start_reduce_scatter(x, axis)
    pending.wait()
    return scattered


def start_reduce_scatter(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Begin a summing reduce-scatter along dim 0; the result may be read after wait()."""
    if axis.size == 1:
        return x, DONE
    scattered = torch.empty((x.shape[0] // axis.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return scattered, start_reduce_scatter_into(scattered, x.contiguous(), axis)


def start_reduce_scatter_into(scattered: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Begin a summing reduce-scatter into a given buffer."""
    if axis.size == 1:
        return DONE
    axis.ledger.add(axis.name, "reduce_scatter", _bytes(x))
    work = dist.reduce_scatter_tensor(scattered, x, op=dist.ReduceOp.SUM, group=axis.group, async_op=True)
    return _Started(work, axis, "reduce_scatter")


def broadcast_(x: Tensor, axis: Axis, source: int) -> Tensor:
    """Copy `x` of axis rank `source` to all; returns x."""
    if axis.size > 1:
        axis.ledger.add(axis.name, "broadcast", _bytes(x))
        dist.broadcast(x, src=axis.ranks[source], group=axis.group)
    return x


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    if axis.size > 1:
        dist.barrier(group=axis.group)
