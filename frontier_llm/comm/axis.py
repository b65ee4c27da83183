"""Axis: one direction of the mesh, as seen by one rank; passed to whoever communicates, never looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from frontier_llm.comm.algorithms import FLAT, AlgorithmTable
from frontier_llm.comm.baton import Baton
from frontier_llm.comm.group import Collectives, Group
from frontier_llm.comm.ledger import Ledger
from frontier_llm.comm.turns import Turns
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
