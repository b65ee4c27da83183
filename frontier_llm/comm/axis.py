"""Axes of the device mesh (tp, dp, pp …), and the collectives over the ranks of an axis.

Code that communicates receives an `Axis` as an argument. On an axis of size 1 each collective is the identity. On other
axes the ledger of the axis counts each collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from frontier_llm.comm.algorithms import FLAT, AlgorithmTable
from frontier_llm.comm.group import DONE, Collectives, Group, OneInFlight, Pending
from frontier_llm.comm.interleaving import Interleaving
from frontier_llm.comm.ledger import Ledger
from frontier_llm.topology.grid import AXES


@dataclass(frozen=True)
class Axis:
    """The ranks along one dimension of the mesh, including this rank.

    `group` transfers the data. It is None on an axis of size 1, because every collective is the identity there.
    """

    name: str
    rank: int  # number of this rank within the axis
    size: int
    ranks: tuple[int, ...]  # global ranks in axis order
    group: Group | None = field(default=None, compare=False, repr=False)
    ledger: Ledger = field(default_factory=Ledger, compare=False, repr=False)
    # collectives in two stages: within nodes and between nodes; None unless the axis has equally many ranks on each of
    # several nodes
    hierarchical: Collectives | None = field(default=None, compare=False, repr=False)
    nodes: int = 1  # Number of nodes if communication in two stages is possible, otherwise 1.
    # (node axis, rail axis) of this rank, if tokens are sent to experts in two stages. The rail axis has the ranks with
    # the same local rank on all nodes.
    levels: tuple[Axis, Axis] | None = field(default=None, compare=False, repr=False)
    algorithms: AlgorithmTable = field(default=FLAT, compare=False, repr=False)  # chooses `hierarchical` for a call.
    # Lets only one communication of this rank be in flight; None if a rank may have several
    in_flight: OneInFlight | None = field(default=None, compare=False, repr=False)
    # on the axes of experts: computes one microbatch while tokens of another microbatch are sent to their experts
    interleaving: Interleaving | None = field(default=None, compare=False, repr=False)

    def collectives(self, operation: str, size_bytes: int) -> Collectives | None:
        """Return the implementation for a collective, or None on an axis of size 1.

        `size_bytes` is the size of the complete tensor, as in the ledger. The size is equal on all ranks, so all ranks
        choose the same algorithm.
        """
        chosen = self.algorithms.choose(operation, self.nodes, size_bytes)
        return self.hierarchical if self.hierarchical is not None and chosen == "hierarchical" else self.group


def single(name: str, global_rank: int = 0, ledger: Ledger | None = None) -> Axis:
    """Return an axis of one rank, on which every collective is the identity."""
    return Axis(name, 0, 1, (global_rank,), None, ledger or Ledger())


@dataclass(frozen=True)
class Mesh:
    """The device mesh as seen by one rank: all axes that include this rank."""

    tp: Axis
    cp: Axis  # ranks that hold different tokens of the same sequences
    pp: Axis
    dp: Axis  # ranks that read different sequences
    replicas: Axis  # all ranks that hold the same weights, dp x cp: gradients are summed over it
    world: Axis
    tied: Axis  # the two stages that hold a tied embedding; size 1 everywhere else
    channels: Mapping[str, Axis] = field(repr=False)  # pipeline messages: one communicator per `schedule.Channel`
    ledger: Ledger = field(default_factory=Ledger, repr=False)
    # ranks that together hold one copy of all experts; the `etp` ranks that split an expert's width are consecutive
    ep: Axis = field(default_factory=lambda: single("ep"))
    etp: Axis = field(default_factory=lambda: single("etp"))
    edp: Axis = field(default_factory=lambda: single("edp"))  # ranks that hold the same part of the same experts

    @property
    def one_in_flight(self) -> bool:
        """True if each communication of this rank must end before the next begins."""
        return self.world.in_flight is not None

    def axis(self, name: str) -> Axis:
        """Return the axis with this name, for example 'tp'."""
        axis: Axis = getattr(self, name)
        return axis


def serial_mesh() -> Mesh:
    """Return the mesh of a single process. Every axis has size 1, and torch.distributed is not initialised."""
    ledger = Ledger()
    axes = {name: single(name, ledger=ledger) for name in (*AXES, "world", "tied")}
    return Mesh(**axes, replicas=axes["dp"], channels={}, ledger=ledger)


class Started:
    """A running collective or message. The ledger of the axis counts it and records the time of waiting for it."""

    def __init__(
        self, axis: Axis, operation: str, size_bytes: int, begin: Callable[[], Any], staged: bool = False
    ) -> None:
        """Start the communication by calling `begin`.

        A `staged` collective consists of other communications. Only these other communications count as in flight, and
        the staged collective itself does not. Some transports transfer the data in `begin` and others in `wait`, so
        both times count as blocked.
        """
        self._axis = axis
        self._in_flight = not staged
        self._begin: Callable[[], Any] | None = begin  # keeps the tensors alive until the wait
        self._call = axis.ledger.add(axis.name, operation, size_bytes)
        axis.ledger.count_in_flight(self._in_flight)
        with axis.ledger.blocked(self._call, last=False):
            self._work = begin() if axis.in_flight is None else axis.in_flight.take(begin, staged)
        # `take` has already ensured that this communication ends before the next one begins. It therefore counts as
        # ended, even if wait() is called later.
        if axis.in_flight is not None:
            self._end()

    def wait(self) -> None:
        """Wait for the result and record the blocked time. Later calls return at once."""
        if self._call.finished:
            return
        with self._axis.ledger.blocked(self._call):
            self._work.wait()
        self._begin = None
        self._end()

    def _end(self) -> None:
        self._axis.ledger.count_in_flight(-self._in_flight)
        self._in_flight = False

    def is_done(self) -> bool:
        """Return True if the sent tensor may be written to or freed. Never blocks."""
        return bool(self._work.is_done())


def _start(axis: Axis, operation: str, size_bytes: int, start: Callable[[Collectives], Pending]) -> Pending:
    """Start a collective with the algorithm (flat or hierarchical) that the axis chooses for it."""
    group = axis.collectives(operation, size_bytes)
    if group is None:
        return DONE
    return Started(axis, operation, size_bytes, lambda: start(group), staged=group is axis.hierarchical)


def all_reduce_(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce `x` in place over the axis. `op` is 'sum' or 'max'. Returns x."""
    start_all_reduce_(x, axis, op).wait()
    return x


def start_all_reduce_(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Begin an in-place all-reduce of a contiguous tensor. `op` is 'sum' or 'max'."""
    return _start(axis, "all_reduce", x.nbytes, lambda group: group.start_all_reduce_(x, op))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenate each rank's `x` along dim 0 in axis order: [n, …] → [n * size, …]."""
    gathered, pending = start_all_gather(x, axis)
    pending.wait()
    return gathered


def start_all_gather(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Begin an all-gather along dim 0. Returns (result, pending); the result may be read after wait()."""
    if axis.group is None:
        return x, DONE
    gathered = torch.empty((axis.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    return gathered, start_all_gather_into(gathered, x.contiguous(), axis)


def start_all_gather_into(gathered: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Begin an all-gather into a given buffer. `x` may be this rank's part of `gathered` itself."""
    return _start(axis, "all_gather", gathered.nbytes, lambda group: group.start_all_gather_into(gathered, x))


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum `x` over the ranks and return this rank's part along dim 0: [n * size, …] → [n, …]."""
    scattered, pending = start_reduce_scatter(x, axis)
    pending.wait()
    return scattered


def start_reduce_scatter(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Begin a summing reduce-scatter along dim 0. Returns (result, pending); the result may be read after wait()."""
    if axis.group is None:
        return x, DONE
    scattered = torch.empty((x.shape[0] // axis.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return scattered, start_reduce_scatter_into(scattered, x.contiguous(), axis)


def start_reduce_scatter_into(scattered: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Begin a summing reduce-scatter into a given buffer. `scattered` may be this rank's part of `x` itself."""
    return _start(axis, "reduce_scatter", x.nbytes, lambda group: group.start_reduce_scatter_into(scattered, x))


def start_all_to_all_into(arriving: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Begin to send part r of `x` to axis rank r and to receive part r of `arriving` from it.

    The two buffers are different and have the same shape.
    """
    return _start(axis, "all_to_all", x.nbytes, lambda group: group.start_all_to_all_into(arriving, x))


def start_all_to_all_rows(
    x: Tensor, received: Sequence[int], sent: Sequence[int], axis: Axis
) -> tuple[Tensor, Pending]:
    """Begin to send `sent[r]` rows of `x` to axis rank r, in axis order, and to receive `received[r]` rows from it.

    Returns (received rows, pending); the rows may be read after wait().
    Every rank must send at least one row to every rank, because RCCL has hung if a rank had nothing to receive.
    A caller without a row for a rank sends an unused row.
    """
    assert min(*received, *sent) > 0 and sum(sent) == x.shape[0], (
        "the hierarchical all-to-all needs rows between every pair of ranks: RCCL hangs if two ranks exchange none"
    )
    if axis.group is None:
        return x, DONE
    x = x.contiguous()
    arriving = x.new_empty(sum(received), *x.shape[1:])
    group = axis.group
    return arriving, Started(
        axis, "all_to_all", x.nbytes, lambda: group.start_all_to_all_rows_into(arriving, x, received, sent)
    )


def broadcast_(x: Tensor, axis: Axis, source: int) -> Tensor:
    """Copy `x` of axis rank `source` into `x` of all ranks. Returns x."""
    _start(axis, "broadcast", x.nbytes, lambda group: group.start_broadcast_(x, source)).wait()
    return x


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis has called this function."""
    _start(axis, "barrier", 0, lambda group: group.start_barrier()).wait()
