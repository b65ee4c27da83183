"""Seconds of one collective or message, by the ranks that take part, where they sit, and how many share the NICs."""

from __future__ import annotations

import numpy as np

from frontier_llm.costs.workload import Number
from frontier_llm.machine.rates import Rates


def table_s(rates: Rates, nodes: Number, size_bytes: Number) -> Number:
    """Measured all-reduce seconds, interpolated in log(nodes) and log(bytes); linear in bytes beyond the largest message.

    A line latency + bytes / bandwidth misses these medians by 17-46 % (docs/planner.md), so they stay a table.
    """
    log_nodes, log_bytes = np.log(rates.table_nodes), np.log(rates.table_bytes)
    log_seconds = np.log(np.asarray(rates.table_seconds))
    size = np.maximum(np.asarray(size_bytes, dtype=float), rates.table_bytes[0])
    beyond = np.maximum(size / rates.table_bytes[-1], 1.0)
    y = np.clip(np.log(size), log_bytes[0], log_bytes[-1])
    x = np.clip(np.log(np.maximum(np.asarray(nodes, dtype=float), 1.0)), log_nodes[0], log_nodes[-1])
    row = np.clip(np.searchsorted(log_nodes, x, side="right") - 1, 0, len(log_nodes) - 2)
    column = np.clip(np.searchsorted(log_bytes, y, side="right") - 1, 0, len(log_bytes) - 2)
    u = (x - log_nodes[row]) / (log_nodes[row + 1] - log_nodes[row])
    v = (y - log_bytes[column]) / (log_bytes[column + 1] - log_bytes[column])
    low = log_seconds[row, column] * (1 - v) + log_seconds[row, column + 1] * v
    high = log_seconds[row + 1, column] * (1 - v) + log_seconds[row + 1, column + 1] * v
    return np.exp(low * (1 - u) + high * u) * beyond


def fabric_bandwidth(rates: Rates, ranks: Number) -> Number:
    """Bus bandwidth, bytes/s, of a group of `ranks` neighbours inside a node."""
    return np.interp(np.asarray(ranks, dtype=float), rates.fabric_size, rates.fabric_bytes_s) * rates.fabric_share


def node_ring_s(rates: Rates, ranks: Number, size_bytes: Number, passes: int) -> Number:
    """A ring collective inside one node; `passes` 2 = all-reduce, 1 = reduce-scatter or all-gather of `size_bytes` in total.

    With a measured one-node table its shape over message size is kept and scaled by the group's bandwidth and ring factor.
    """
    ranks = np.asarray(ranks, dtype=float)
    share = (ranks - 1) / np.maximum(ranks, 1)
    ideal = passes * share * size_bytes / fabric_bandwidth(rates, ranks)
    if rates.table_nodes:
        full = rates.node_devices
        measured = table_s(rates, 1, np.maximum(size_bytes, 1.0))
        large = 2 * (full - 1) / full * np.maximum(size_bytes, 1.0) / fabric_bandwidth(rates, full) * rates.fabric_share
        over = np.maximum(measured - large, 0.0) * np.minimum(share * full / (full - 1), 1.0) * passes / 2
        return np.where(ranks > 1, ideal + over, 0.0)
    return np.where(ranks > 1, ideal + rates.fabric_latency_s + passes * (ranks - 1) * rates.fabric_hop_s, 0.0)


def spread_s(rates: Rates, ranks: Number, per_node: Number, sharing: Number, size_bytes: Number, passes: int) -> Number:
    """A collective over `ranks`, `per_node` of them on each node, while `sharing` such groups use the node's NICs at once.

    `passes` 2 = all-reduce; 1 = reduce-scatter or all-gather of `size_bytes` in total. One formula for both tiers: inside a
    node see `node_ring_s`; across nodes each ring enters and leaves every node once, so a group gets 1/sharing of the NICs,
    and never more than the fabric inside the node carries.
    """
    ranks, per_node = np.asarray(ranks, dtype=float), np.asarray(per_node, dtype=float)
    inside = node_ring_s(rates, ranks, size_bytes, passes)
    nodes = np.maximum(ranks / per_node, 1.0)
    share = (ranks - 1) / np.maximum(ranks, 1)
    crowd = np.where(np.asarray(sharing) > 1, rates.network_crowding, 1.0)
    wire = rates.node_network_bytes_s * rates.network_efficiency * crowd / sharing
    fabric = np.where(per_node > 1, fabric_bandwidth(rates, per_node), np.inf)
    ring = passes * share * size_bytes / np.minimum(wire, fabric)
    if rates.table_nodes:
        total = size_bytes * sharing  # what the NICs of a node carry, as if by one communicator that spans the node
        across = table_s(rates, nodes, total) * passes / 2
        if passes == 1:  # RCCL has only rings for these: a hop per rank, and no tree to hide it
            across = np.maximum(across, ring + rates.network_latency_s) + (ranks - 1) * rates.network_hop_s
    else:
        across = ring + rates.network_latency_s + passes * (nodes - 1) * rates.network_hop_s
    return np.where(ranks <= per_node, inside, across) * (ranks > 1)


def message_s(rates: Rates, size_bytes: Number, inside: Number, sharing: Number) -> Number:
    """A point-to-point message; `inside` 1 = within the node, `sharing` = devices of the node that send at the same time."""
    near = rates.fabric_latency_s + size_bytes / fabric_bandwidth(rates, 2)
    far = rates.network_latency_s + size_bytes / (rates.node_network_bytes_s * rates.network_efficiency / sharing)
    return np.where(inside, near, far)
