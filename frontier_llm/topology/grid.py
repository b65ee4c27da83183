"""global rank ↔ (pp, dp, tp): the bijection, and the groups that it implies, as plain tuples of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from frontier_llm.errors import ConfigError, suggest

AXES = ("tp", "dp", "pp")
AXIS_ORDERS = ("tp-dp-pp", "tp-pp-dp")


@dataclass(frozen=True)
class Grid:
    """The mesh of ranks. `order` is innermost first: ranks that differ in its first axis are neighbours.

    TP is always innermost, because its collectives run in every layer and must stay on a node's Infinity Fabric
    (200/100/50 GB/s between GCDs against 12.5 GB/s per GCD through the NICs).
    """

    tp: int
    pp: int
    dp: int
    order: str = "tp-dp-pp"

    def __post_init__(self) -> None:
        if self.order not in AXIS_ORDERS:
            raise ConfigError(
                f"{self.order!r} is not an axis order with tp innermost", suggest(self.order, AXIS_ORDERS), "parallel.axis_order"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def degree(self, axis: str) -> int:
        """Size of an axis by name."""
        return int(getattr(self, axis))

    def coordinates(self, global_rank: int) -> dict[str, int]:
        """{'tp': …, 'dp': …, 'pp': …} of a rank."""
        place = {}
        for axis in self.order.split("-"):
            global_rank, place[axis] = divmod(global_rank, self.degree(axis))
        return place

    def global_rank(self, place: Mapping[str, int]) -> int:
        """The rank at the given coordinates."""
        rank, stride = 0, 1
        for axis in self.order.split("-"):
            rank += place[axis] * stride
            stride *= self.degree(axis)
        return rank

    def group(self, axis: str, global_rank: int) -> tuple[int, ...]:
        """The ranks that share every coordinate with `global_rank` but `axis`, ordered along that axis."""
        place = self.coordinates(global_rank)
        return tuple(self.global_rank({**place, axis: index}) for index in range(self.degree(axis)))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups along an axis; they partition the world."""
        others = [other for other in AXES if other != axis]
        starts = [
            self.global_rank({**dict(zip(others, place, strict=True)), axis: 0})
            for place in product(*(range(self.degree(other)) for other in others))
        ]
        return tuple(self.group(axis, start) for start in sorted(starts))
