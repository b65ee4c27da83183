"""Seconds of one collective or message, from its ranks, their placement on nodes and the groups that share the NICs.

A collective is flat (one ring or tree) or hierarchical. A hierarchical collective has a stage inside each node and a
stage between nodes, as `comm/hierarchical.py` executes it.
"""

from __future__ import annotations

import numpy as np

from frontier_llm.machine.rates import Rates, Table, fabric_bandwidth
from frontier_llm.planner.costs.layouts import Number

# Number of times that a ring moves the complete tensor. An all-reduce is a reduce-scatter and an all-gather. For an
# all-to-all, the tensor is the rank's own input.
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}

# Seconds of NCCL's all-reduce of a few bytes: start, and a step of its tree inside a node and between nodes. They are
# the latencies of the algorithm "tree" with the protocol "LL" in the tuning model of NCCL 2.18 to 2.23.
TREE_START_S = 6.8e-6
TREE_NODE_STEP_S = 0.6e-6
TREE_NETWORK_STEP_S = 5e-6


def table_s(table: Table, row: Number, size_bytes: Number) -> Number:
    """Return the seconds of a collective by interpolation in a table of measured times.

    The table is interpolated in the logarithms of its rows (numbers of nodes or ranks) and of the bytes.

    Above the largest measured message the time is proportional to the bytes. A table is used because the formula
    latency + bytes / bandwidth misses Frontier's medians by 17-46 % (docs/benchmarks/log.md).
    """
    log_rows = np.log(table.rows)
    log_bytes = np.log(table.sizes_bytes)
    log_seconds = np.log(np.asarray(table.seconds))
    size = np.maximum(np.asarray(size_bytes, dtype=float), table.sizes_bytes[0])
    beyond = np.maximum(size / table.sizes_bytes[-1], 1.0)
    i, u = _between(log_rows, np.log(np.maximum(np.asarray(row, dtype=float), 1.0)))
    j, v = _between(log_bytes, np.log(size))
    next_row = np.minimum(i + 1, len(log_rows) - 1)
    low = log_seconds[i, j] * (1 - v) + log_seconds[i, j + 1] * v
    high = log_seconds[next_row, j] * (1 - v) + log_seconds[next_row, j + 1] * v
    return np.exp(low * (1 - u) + high * u) * beyond


def _between(grid: np.ndarray, at: Number) -> tuple[Number, Number]:
    """Return (index of the grid point below, fraction of the distance to the next point), clipped to the grid."""
    if len(grid) == 1:
        return np.zeros(np.shape(at), dtype=int), np.zeros(np.shape(at))
    at = np.clip(at, grid[0], grid[-1])
    index = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
    return index, (at - grid[index]) / (grid[index + 1] - grid[index])


def node_s(rates: Rates, ranks: Number, size_bytes: Number, operation: str) -> Number:
    """Return the seconds of a collective inside one node.

    `size_bytes` is the complete tensor: the result of an all-gather, the input of a reduce-scatter. If this operation
    was measured on the machine, its table is used. Otherwise the time is a ring's bandwidth term plus latency. If the
    machine has a table of all-reduces over nodes, the latency is the table's time for one node without the bandwidth
    term. The latency is scaled to the group's share of a ring over the node, (ranks - 1) / ranks.
    """
    ranks = np.asarray(ranks, dtype=float)
    passes = PASSES[operation]
    if operation in rates.node_tables:
        return np.where(ranks > 1, table_s(rates.node_tables[operation], ranks, size_bytes), 0.0)
    share = (ranks - 1) / np.maximum(ranks, 1)
    ideal = passes * share * size_bytes / fabric_bandwidth(rates, ranks)
    if rates.all_reduce_table:
        full = rates.node_devices
        measured = table_s(rates.all_reduce_table, 1, np.maximum(size_bytes, 1.0))
        large = 2 * (full - 1) / full * np.maximum(size_bytes, 1.0) / fabric_bandwidth(rates, full) * rates.fabric_share
        over = np.maximum(measured - large, 0.0) * np.minimum(share * full / (full - 1), 1.0) * passes / 2
        return np.where(ranks > 1, ideal + over, 0.0)
    return np.where(ranks > 1, ideal + rates.fabric_latency_s + passes * (ranks - 1) * rates.fabric_hop_s, 0.0)


def _network_bytes_s(rates: Rates) -> float:
    """Return the bytes per second that large messages reach through all NICs of a node, in one direction."""
    return rates.node_network_bytes_s * rates.network_efficiency * rates.network_share


def flat_s(
    rates: Rates,
    ranks: Number,
    per_node: Number,
    sharing: Number,
    size_bytes: Number,
    operation: str,
) -> Number:
    """Return the seconds of a collective over `ranks` in one ring (or RCCL's tree), `per_node` ranks on each node.

    `sharing` such groups use the NICs of a node at the same time. If all ranks are in one node, the time is `node_s`.
    Otherwise the ring enters and leaves every node once. Each group then has 1/sharing of the bandwidth of a node's
    NICs. The bandwidth of the fabric inside the node is a further limit.
    """
    ranks = np.asarray(ranks, dtype=float)
    per_node = np.asarray(per_node, dtype=float)
    passes = PASSES[operation]
    inside = node_s(rates, ranks, size_bytes, operation)
    nodes = np.maximum(ranks / per_node, 1.0)
    share = (ranks - 1) / np.maximum(ranks, 1)
    crowd = np.where(np.asarray(sharing) > 1, rates.network_crowding, 1.0)
    wire = _network_bytes_s(rates) * crowd / sharing
    fabric = np.where(per_node > 1, fabric_bandwidth(rates, per_node), np.inf)
    ring = passes * share * size_bytes / np.minimum(wire, fabric)
    if rates.all_reduce_table:
        # bytes that pass the NICs of a node; the table was measured with one communicator per node
        total = size_bytes * sharing
        across = table_s(rates.all_reduce_table, nodes, total) * passes / 2 / rates.network_share
        if passes == 1:  # RCCL has only rings for these operations, so each rank adds a hop
            across = np.maximum(across, ring + rates.network_latency_s) + (ranks - 1) * rates.network_hop_s
    else:
        across = ring + rates.network_latency_s + passes * (nodes - 1) * rates.network_hop_s
    return np.where(ranks <= per_node, inside, across) * (ranks > 1)


def message_s(rates: Rates, size_bytes: Number, inside: Number, sharing: Number) -> Number:
    """Return the seconds of a point-to-point message.

    `inside` is true if both ranks are in one node. `sharing` is the number of devices of a node that send at the same
    time.
    """
    near = rates.fabric_latency_s + size_bytes / fabric_bandwidth(rates, 2)
    far = rates.network_latency_s + size_bytes / (_network_bytes_s(rates) / sharing)
    return np.where(inside, near, far)


def small_sum_s(rates: Rates, ranks: Number) -> Number:
    """Return the seconds of NCCL's all-reduce of a few bytes over `ranks` ranks, which occupy complete nodes.

    The values go up the tree and down again: through the ranks of a node and through log2 N levels of nodes.
    """
    per_node = np.minimum(ranks, rates.node_devices)
    levels = np.log2(np.maximum(np.asarray(ranks, dtype=float) / per_node, 1.0))
    steps_s = (per_node - 1) * TREE_NODE_STEP_S + levels * TREE_NETWORK_STEP_S
    return np.where(np.asarray(ranks) > 1, TREE_START_S + 2 * steps_s, 0.0)


def rail_rounds(nodes: Number) -> Number:
    """Return how many messages of a reduce-scatter or all-gather between N nodes follow each other: ceil(log2 N)."""
    return np.ceil(np.log2(np.maximum(np.asarray(nodes, dtype=float), 1.0)))


def rail_bytes(nodes: Number, per_node: Number, size_bytes: Number) -> Number:
    """Return the bytes that a rank sends between nodes in one reduce-scatter or all-gather.

    With N nodes and k ranks per node these are N - 1 blocks of 1/(N k) of the tensor.
    """
    return (np.asarray(nodes, dtype=float) - 1) * size_bytes / (nodes * per_node)


def hierarchical_s(
    rates: Rates,
    ranks: Number,
    per_node: Number,
    sharing: Number,
    size_bytes: Number,
    operation: str,
) -> Number:
    """Return the seconds of a two-stage collective over `ranks`, `per_node` ranks on each node.

    `sharing` such groups use the NICs of a node at the same time. A rail, the ranks with the same place in each node,
    therefore has 1/(per_node x sharing) of their bandwidth. The times of the two stages are added, although the engine
    overlaps the stages chunk by chunk.
    """
    per_node = np.minimum(np.asarray(per_node, dtype=float), ranks)
    passes = PASSES[operation]
    nodes = np.maximum(np.asarray(ranks, dtype=float) / per_node, 1.0)
    inside = node_s(rates, per_node, size_bytes, operation)
    crowd = np.where(np.asarray(sharing) > 1, rates.network_crowding, 1.0)
    nic = _network_bytes_s(rates) * crowd / (per_node * sharing)
    between = passes * (rail_rounds(nodes) * rates.network_latency_s + rail_bytes(nodes, per_node, size_bytes) / nic)
    return inside + np.where(nodes > 1, between, 0.0)


def collective_s(
    rates: Rates,
    ranks: Number,
    per_node: Number,
    sharing: Number,
    size_bytes: Number,
    operation: str,
) -> Number:
    """Return the seconds of the faster algorithm for this message size.

    It is the flat one if the software stack has no two-stage collectives (`Rates.hierarchical`).
    """
    flat = flat_s(
        rates=rates,
        ranks=ranks,
        per_node=per_node,
        sharing=sharing,
        size_bytes=size_bytes,
        operation=operation,
    )
    if not rates.hierarchical:
        return flat
    return np.minimum(
        flat,
        hierarchical_s(
            rates=rates,
            ranks=ranks,
            per_node=per_node,
            sharing=sharing,
            size_bytes=size_bytes,
            operation=operation,
        ),
    )
