"""Two-stage collectives of an axis that spans nodes, in closed form: messages, bytes and seconds (comm/hierarchical.py plays them)."""

from __future__ import annotations

import numpy as np

from frontier_llm.costs.collectives import node_ring_s, spread_s
from frontier_llm.costs.workload import Number
from frontier_llm.machine.rates import Rates


def rail_rounds(nodes: Number) -> Number:
    """Dependent messages of one reduce-scatter or all-gather between nodes: ceil(log2 N), for any N."""
    return np.ceil(np.log2(np.maximum(np.asarray(nodes, dtype=float), 1.0)))


def rail_bytes(nodes: Number, per_node: Number, size_bytes: Number) -> Number:
    """Bytes that a rank sends between nodes for one of them: N - 1 blocks of 1/(N k) of the tensor."""
    return (np.asarray(nodes, dtype=float) - 1) * size_bytes / (nodes * per_node)


def hierarchical_s(rates: Rates, nodes: Number, per_node: Number, sharing: Number, size_bytes: Number, passes: int) -> Number:
    """Seconds of a two-stage collective over nodes × per_node ranks, while `sharing` such groups use each node's NICs.

    `passes` 2 = all-reduce, 1 = reduce-scatter or all-gather of `size_bytes` in total. Each rail gets 1/(per_node × sharing) of the
    node's NICs; the stages follow each other (the engine overlaps them chunk by chunk, which this does not credit).
    """
    per_node = np.asarray(per_node, dtype=float)
    inside = node_ring_s(rates, per_node, size_bytes, passes)
    crowd = np.where(np.asarray(sharing) > 1, rates.network_crowding, 1.0)
    nic = rates.node_network_bytes_s * rates.network_efficiency * crowd / (per_node * sharing)
    between = passes * (rail_rounds(nodes) * rates.network_latency_s + rail_bytes(nodes, per_node, size_bytes) / nic)
    return inside + np.where(np.asarray(nodes) > 1, between, 0.0)


def crossover_bytes(
    rates: Rates, nodes: int, per_node: int, sharing: int, passes: int, sizes: np.ndarray
) -> list[tuple[float, str, float]]:
    """[(size, cheaper algorithm, seconds of flat / seconds of hierarchical), …] for message sizes: where one overtakes the other."""
    flat = spread_s(rates, nodes * per_node, per_node, sharing, sizes, passes)
    staged = hierarchical_s(rates, nodes, per_node, sharing, sizes, passes)
    return [
        (float(size), "hierarchical" if two < one else "flat", float(one / two)) for size, one, two in zip(sizes, flat, staged, strict=True)
    ]
