"""Mesh of ranks: conversion between global ranks and coordinates (pp, dp, cp, tp), and the groups of each axis.

The ranks of one pipeline stage form a mesh tp x cp x dp for attention and a mesh etp x ep x edp for experts. The first
axis of each mesh is innermost and consists of consecutive ranks. Expert-parallel ranks therefore share a node if they
fit into one.

`held_positions` returns the tokens of a sequence that a context-parallel rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from frontier_llm.errors import ConfigError, suggest

AXES = ("tp", "cp", "dp", "pp")
AXIS_ORDERS = ("tp-dp-pp", "tp-pp-dp")


@dataclass(frozen=True)
class Grid:
    """The mesh of ranks. `order` lists the axes, innermost first. Ranks along the first axis are consecutive.

    TP is always innermost, because its collectives run in every layer and must stay inside a node. In an MI250X node,
    Infinity Fabric has 200, 100 or 50 GB/s between two GCDs, and the NICs have 12.5 GB/s per GCD. CP always follows TP:
    it also communicates in every layer, but sends only keys and values.

    Raises ConfigError if `order` is not in AXIS_ORDERS.
    """

    tp: int
    pp: int
    dp: int
    order: str = "tp-dp-pp"
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if self.order not in AXIS_ORDERS:
            raise ConfigError(
                f"{self.order!r} is not an axis order with tp innermost",
                suggest(self.order, AXIS_ORDERS),
                "parallel.axis_order",
            )

    @property
    def _innermost_first(self) -> list[str]:
        first, *others = self.order.split("-")
        return [first, "cp", *others]

    def describe(self, chunks: int = 1) -> str:
        """Return for example 'TP2 x CP2 x PP4 x 2 chunks x DP8'. CP and chunks are omitted if they are 1."""
        degrees = [f"TP{self.tp}"]
        if self.cp > 1:
            degrees.append(f"CP{self.cp}")
        degrees.append(f"PP{self.pp}")
        if chunks > 1:
            degrees.append(f"{chunks} chunks")
        degrees.append(f"DP{self.dp}")
        return " x ".join(degrees)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def replicas(self) -> str:
        """Name of the joint axis of all ranks with the same weights: gradients are summed over it, and ZeRO shards
        the optimizer state over it.
        """
        return "dp.cp" if self.cp > 1 else "dp"

    @property
    def edp(self) -> int:
        """Number of replicas of each expert."""
        return self.world_size // (self.pp * self.ep * self.etp)

    def degree(self, axis: str) -> int:
        """Return the size of an axis. The size of a joint axis like "dp.cp" is the product of its parts."""
        return prod(int(getattr(self, part)) for part in axis.split("."))

    def plane(self, global_rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same layers: all ranks with the same pp coordinate, in ascending order."""
        inner = [axis for axis in self._innermost_first if axis != "pp"]
        place = self.coordinates(global_rank)
        places = product(*(range(self.degree(axis)) for axis in reversed(inner)))
        return tuple(
            self.global_rank({**place, **dict(zip(reversed(inner), values, strict=True))}) for values in places
        )

    def experts_group(self, global_rank: int) -> tuple[int, ...]:
        """Return the ranks that together hold one copy of all experts and exchange tokens, etp innermost."""
        plane = self.plane(global_rank)
        size = self.etp * self.ep
        first = plane.index(global_rank) // size * size
        return plane[first : first + size]

    def split_experts_group(self, global_rank: int) -> tuple[int, ...]:
        """Return the ranks that split the width of the same experts (etp)."""
        together = self.experts_group(global_rank)
        first = together.index(global_rank) // self.etp * self.etp
        return together[first : first + self.etp]

    def replicas_group(self, global_rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same part of the same experts (edp)."""
        plane = self.plane(global_rank)
        size = self.etp * self.ep
        return plane[plane.index(global_rank) % size :: size]

    def coordinates(self, global_rank: int) -> dict[str, int]:
        """Return {'tp': …, 'cp': …, 'dp': …, 'pp': …} of a rank."""
        place = {}
        for axis in self._innermost_first:
            global_rank, place[axis] = divmod(global_rank, self.degree(axis))
        return place

    def global_rank(self, place: Mapping[str, int]) -> int:
        """Return the rank at the given coordinates."""
        rank = 0
        stride = 1
        for axis in self._innermost_first:
            rank += place[axis] * stride
            stride *= self.degree(axis)
        return rank

    def group(self, axis: str, global_rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `global_rank` only along `axis`, ordered along that axis.

        The first part of a joint axis like "dp.cp" is outermost.
        """
        place = self.coordinates(global_rank)
        parts = axis.split(".")
        indices = product(*(range(self.degree(part)) for part in parts))
        return tuple(self.global_rank({**place, **dict(zip(parts, index, strict=True))}) for index in indices)


def held_positions(length: int, cp: int, rank: int) -> tuple[range, ...]:
    """Return the positions of a sequence that context-parallel rank `rank` holds, as ranges in ascending order.

    The sequence is cut into 2·cp chunks, and rank r holds chunks r and 2·cp − 1 − r. With causal attention a query of
    chunk c attends to about c + 1/2 chunks of keys, so all ranks have the same work. If the sequence were cut into cp
    chunks, the last rank would have 2·cp − 1 times the work of the first.
    """
    if cp == 1:
        return (range(length),)
    size = length // (2 * cp)
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * cp - 1 - rank))


def tensor_groups_stay_in_nodes(tensor: int, node_devices: int, world_size: int) -> bool:
    """Return whether the `tensor` neighbouring ranks of every tensor-parallel group are on one node."""
    if tensor > node_devices:
        return False
    return world_size <= node_devices or node_devices % tensor == 0
