"""Two-stage collectives of an axis that spans nodes, in closed form: messages, bytes and seconds
(comm/hierarchical.py plays them).
"""

from __future__ import annotations

import numpy as np

from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.collectives import PASSES, flat_s, node_s
from frontier_llm.planner.costs.layouts import Number


def rail_rounds(nodes: Number) -> Number:
    """Dependent messages of one reduce-scatter or all-gather between nodes: ceil(log2 N), for any N."""
    return np.ceil(np.log2(np.maximum(np.asarray(nodes, dtype=float), 1.0)))


def rail_bytes(nodes: Number, per_node: Number, size_bytes: Number) -> Number:
    """Bytes that a rank sends between nodes for one of them: N - 1 blocks of 1/(N k) of the tensor."""
    return (np.asarray(nodes, dtype=float) - 1) * size_bytes / (nodes * per_node)


def hierarchical_s(
    rates: Rates, ranks: Number, per_node: Number, sharing: Number, size_bytes: Number, operation: str
) -> Number:
    """Seconds of a two-stage collective over `ranks`, `per_node` on each node, while `sharing` such groups use each
    node's NICs.

    Each rail gets 1/(per_node x sharing) of the node's NICs; the stages follow each other (the engine overlaps them
    chunk by chunk, which this does not credit).
    """
    per_node = np.minimum(np.asarray(per_node, dtype=float), ranks)
    passes = PASSES[operation]
    nodes = np.maximum(np.asarray(ranks, dtype=float) / per_node, 1.0)
    inside = node_s(rates, per_node, size_bytes, operation)
    crowd = np.where(np.asarray(sharing) > 1, rates.network_crowding, 1.0)
    nic = rates.node_network_bytes_s * rates.network_efficiency * crowd / (per_node * sharing)
    between = passes * (rail_rounds(nodes) * rates.network_latency_s + rail_bytes(nodes, per_node, size_bytes) / nic)
    return inside + np.where(nodes > 1, between, 0.0)


def collective_s(
    rates: Rates, ranks: Number, per_node: Number, sharing: Number, size_bytes: Number, operation: str
) -> Number:
    """The faster algorithm for this message size; flat where the software stack has no other (`Rates.hierarchical`)."""
    flat = flat_s(rates, ranks, per_node, sharing, size_bytes, operation)
    if not rates.hierarchical:
        return flat
    return np.minimum(flat, hierarchical_s(rates, ranks, per_node, sharing, size_bytes, operation))
