"""Axis: one direction of the mesh as seen by one rank, and the collectives along it.

An axis is passed to the code that communicates. Each collective is the identity on an axis of size 1, and each is
counted in the axis' ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from frontier_llm.comm.algorithms import FLAT, AlgorithmTable
from frontier_llm.comm.baton import Baton
from frontier_llm.comm.group import DONE, Collectives, Group, Pending, Turns
from frontier_llm.comm.ledger import Ledger
from frontier_llm.topology.grid import AXES


@dataclass(frozen=True)
class Axis:
    """A group of ranks that this rank belongs to.

    `group` moves the bytes; it is None on an axis of size 1, where every collective is the identity.
    """

    name: str
    rank: int  # within the axis
    size: int
    ranks: tuple[int, ...]  # global ranks in axis order
    group: Group | None = field(default=None, compare=False, repr=False)
    ledger: Ledger = field(default_factory=Ledger, compare=False, repr=False)
    # where it spans nodes evenly: the same collectives in two stages, on how many nodes, and for which calls
    hierarchical: Collectives | None = field(default=None, compare=False, repr=False)
    nodes: int = 1
    # where rows go in two stages: its node, its rail
    levels: tuple[Axis, Axis] | None = field(default=None, compare=False, repr=False)
    algorithms: AlgorithmTable = field(default=FLAT, compare=False, repr=False)
    # where only one communication may be in flight
    turns: Turns | None = field(default=None, compare=False, repr=False)
    # of whoever waits for rows, where there are experts
    baton: Baton | None = field(default=None, compare=False, repr=False)

    def collectives(self, operation: str, size_bytes: int) -> Collectives | None:
        """What carries out a collective; bytes are the whole tensor's, as in the ledger, so that every rank chooses
        alike.
        """
        chosen = self.algorithms.choose(operation, self.nodes, size_bytes)
        return self.hierarchical if self.hierarchical is not None and chosen == "hierarchical" else self.group


def single(name: str, global_rank: int = 0, ledger: Ledger | None = None) -> Axis:
    """An axis of one rank."""
    return Axis(name, 0, 1, (global_rank,), None, ledger or Ledger())


@dataclass(frozen=True)
class Mesh:
    """All axes of one rank."""

    tp: Axis
    cp: Axis  # ranks that hold different tokens of the same sequences
    pp: Axis
    dp: Axis  # ranks that read different sequences
    replicas: Axis  # all ranks that hold the same weights, dp x cp: gradients are summed over it
    world: Axis
    tied: Axis  # the two stages that hold a tied embedding; size 1 everywhere else
    channels: Mapping[str, Axis] = field(repr=False)  # pipeline messages: one communicator per direction (see comm.p2p)
    ledger: Ledger = field(default_factory=Ledger, repr=False)
    # ranks that hold one copy of all experts, those that split an expert's width (etp of them) next to each other
    ep: Axis = field(default_factory=lambda: single("ep"))
    etp: Axis = field(default_factory=lambda: single("etp"))
    edp: Axis = field(default_factory=lambda: single("edp"))  # ranks that hold the same part of the same experts

    @property
    def one_in_flight(self) -> bool:
        """Whether each communication of this rank ends before the next begins."""
        return self.world.turns is not None

    def axis(self, name: str) -> Axis:
        """The axis of that name."""
        axis: Axis = getattr(self, name)
        return axis


def serial_mesh() -> Mesh:
    """The mesh of a single process: every axis has size 1 and nothing is initialised."""
    ledger = Ledger()
    axes = {name: single(name, ledger=ledger) for name in (*AXES, "world", "tied")}
    return Mesh(**axes, replicas=axes["dp"], channels={}, ledger=ledger)


class Started:
    """A collective or message, counted and begun; waiting is timed in the axis' ledger."""

    def __init__(
        self, axis: Axis, operation: str, size_bytes: int, begin: Callable[[], Any], staged: bool = False
    ) -> None:
        """`begin` starts it. What is `staged` consists of others, which are in flight themselves.

        Some transports do their work in the start, others while they are waited for: both are timed.
        """
        self._axis = axis
        self._in_flight = not staged
        self._begin: Callable[[], Any] | None = begin  # holds the tensors until the wait
        self._call = axis.ledger.add(axis.name, operation, size_bytes)
        axis.ledger.count_in_flight(self._in_flight)
        with axis.ledger.blocked(self._call, last=False):
            self._work = begin() if axis.turns is None else axis.turns.take(begin, staged)
        if axis.turns is not None:  # the next begins when this one has ended, whenever its result is asked for
            self._end()

    def wait(self) -> None:
        """See Pending."""
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
        """See Sending."""
        return bool(self._work.is_done())


def _start(axis: Axis, operation: str, size_bytes: int, start: Callable[[Collectives], Pending]) -> Pending:
    """Begin a collective by whoever carries it out on this axis."""
    group = axis.collectives(operation, size_bytes)
    return (
        DONE
        if group is None
        else Started(axis, operation, size_bytes, lambda: start(group), staged=group is axis.hierarchical)
    )


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
    """Begin to send part r of `x` to axis rank r and to receive part r of `arriving` from it; two different buffers
    of one shape.
    """
    return _start(axis, "all_to_all", x.nbytes, lambda group: group.start_all_to_all_into(arriving, x))


def start_all_to_all_rows(
    x: Tensor, received: Sequence[int], sent: Sequence[int], axis: Axis
) -> tuple[Tensor, Pending]:
    """Begin to send `sent[r]` rows of `x` to axis rank r, in axis order, and to receive `received[r]` from it; read the
    result after wait().

    Every rank sends at least one row to every rank: RCCL has hung where one had nothing to receive. Whoever has none
    sends one that nobody reads.
    """
    assert min(*received, *sent) > 0 and sum(sent) == x.shape[0], (
        "an all-to-all without rows between two ranks hangs RCCL"
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
    """Copy `x` of axis rank `source` to all; returns x."""
    _start(axis, "broadcast", x.nbytes, lambda group: group.start_broadcast_(x, source)).wait()
    return x


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    _start(axis, "barrier", 0, lambda group: group.start_barrier()).wait()
