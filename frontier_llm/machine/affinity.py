"""CPU cores and NUMA node of each GCD (half of an MI250X) of a Frontier or LUMI-G node, and the links between GCDs.

Both machines have the same node: four MI250X with two GCDs each, one 64-core CPU (Trento) and four Slingshot NICs.
Source of all data: OLCF user docs (systems/frontier_user_guide.rst, Frontier_Node_Diagram.jpg) and the LUMI user guide,
which agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations

LINK_GBPS = 50.0  # GB/s of one Infinity Fabric link in each direction

# Pair of GCDs → number of direct links: 4 inside a package (one MI250X has two GCDs), 2 or 1 between packages. Traffic
# between a pair that is not listed passes through other GCDs.
LINKS: dict[tuple[int, int], int] = {
    (0, 1): 4, (2, 3): 4, (4, 5): 4, (6, 7): 4,
    (0, 6): 2, (2, 4): 2,
    (0, 2): 1, (1, 3): 1, (1, 5): 1, (3, 7): 1, (4, 6): 1, (5, 7): 1,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """NUMA node and cores of a GCD."""

    gcd: int
    numa: int
    cores: tuple[int, ...]  # cores that share an L3 cache; the first is reserved for the system (low-noise mode)

    @property
    def usable_cores(self) -> tuple[int, ...]:
        """Cores that a job may use: all but the first of the GCD's cores."""
        return self.cores[1:]


_FIRST_CORE = {4: 0, 5: 8, 2: 16, 3: 24, 6: 32, 7: 40, 0: 48, 1: 56}

NODE: tuple[Place, ...] = tuple(
    Place(gcd, _FIRST_CORE[gcd] // 16, tuple(range(_FIRST_CORE[gcd], _FIRST_CORE[gcd] + 8))) for gcd in range(8)
)


def link_gbps(one: int, other: int) -> float:
    """Return the direct bandwidth between two GCDs, GB/s per direction; 0 without a direct link."""
    return LINK_GBPS * LINKS.get((min(one, other), max(one, other)), 0)


@cache
def best_ring(gcds: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """Return the best ring through these GCDs as (order of the GCDs, GB/s of the slowest link).

    The best ring is the ring whose slowest link is fastest. Two GCDs form a ring of one link. The bandwidth is 0 if
    every ring has neighbours without a direct link.
    """
    members = tuple(sorted(gcds))
    if len(members) < 2:
        return members, float("inf")
    first = members[0]
    rest = members[1:]

    def bottleneck(order: tuple[int, ...]) -> float:
        return min(link_gbps(one, other) for one, other in zip(order, (*order[1:], order[0]), strict=True))

    best = max(((first, *order) for order in permutations(rest)), key=bottleneck)
    return best, bottleneck(best)


@cache
def bus_limit_gbps(gcds: tuple[int, ...]) -> float:
    """Return an upper bound in GB/s for the bus bandwidth of an all-reduce over these GCDs: their narrowest cut.

    A cut divides the GCDs in two sets. Every ring crosses each cut in both directions, so all rings together have at
    most the one-way bandwidth of the links across the cut. The bound is 200 for {0,1}, 100 for two packages, and 250
    for all eight GCDs. Measured all-reduces reach 0.74 of the bound on two GCDs (147 GB/s) and 0.55 on eight (137
    GB/s).
    """
    members = tuple(sorted(gcds))
    if len(members) < 2:
        return float("inf")
    cuts = (
        (side, tuple(other for other in members if other not in side))
        for size in range(1, len(members) // 2 + 1)
        for side in combinations(members, size)
    )
    return min(sum(link_gbps(one, other) for one in side for other in rest) for side, rest in cuts)
