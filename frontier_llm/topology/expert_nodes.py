"""Cost of the all-to-all to experts across nodes, and the choice between its one-stage and its two-stage form.

A row is one token for one of its experts. In the two-stage form, a token is sent to each node once (between nodes).
From there its rows are distributed inside the node.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np

from frontier_llm.blueprint.expert_work import nodes_of_a_token
from frontier_llm.blueprint.items import Collective
from frontier_llm.blueprint.layout import Layout, layout_of
from frontier_llm.config import ModelConfig, RunConfig
from frontier_llm.machine.rates import Number, Rates, fabric_bandwidth

OneOrMany = TypeVar("OneOrMany", bound=Layout)


def experts_inside(layouts: Layout, rates: Rates) -> Number:
    """Return the number of ep · etp ranks that share a node.

    The ranks of an expert group are consecutive along tp, cp and dp. With the axis order "tp-pp-dp" other pipeline
    stages lie between the replicas, so a node holds fewer ranks of the group.
    """
    inner = layouts.tp * layouts.cp
    node = rates.node_devices
    apart = np.where(layouts.axis_order == "tp-pp-dp", np.maximum(inner * layouts.pp, 1), inner)
    together = np.minimum(node, inner * np.maximum(node // apart, 1))
    return np.minimum(layouts.ep * layouts.etp, together)


def experts_s(collective: Collective, layout: Layout, rates: Rates) -> float:
    """Return the seconds of an all-to-all of token rows that overlaps with nothing.

    The axis is "ep" (all expert ranks), "ep.once" (one of the etp ranks of each expert), "ep.node" (the expert ranks of
    one node) or "ep.rail" (one rank per node).
    """
    ranks = layout.ep * layout.etp
    inside = int(experts_inside(layout, rates))
    among, together = {
        "ep": (ranks, inside),
        "ep.once": (layout.ep, max(1, inside // layout.etp)),
        "ep.node": (inside, inside),
        "ep.rail": (layout.expert_nodes, 1),
    }[collective.axis]
    return float(all_to_all_s(collective.size_bytes, among, together, rates))


def all_to_all_s(size_bytes: Number, ranks: Number, inside: Number, rates: Rates) -> Number:
    """Return the seconds of an all-to-all among `ranks` ranks, each with `size_bytes`, `inside` ranks on each node.

    Messages inside the node use the fabric. At the same time, messages to other nodes use this rank's share of the
    NICs. Every rank sends a message to every other rank, and each message adds a fixed time.
    """
    near_s = (
        size_bytes * (inside - 1) / ranks / fabric_bandwidth(rates, inside)
        + rates.fabric_latency_s
        + (inside - 1) * rates.fabric_hop_s
    )
    nic_bytes_s = rates.node_network_bytes_s * rates.network_efficiency * rates.network_crowding / rates.node_devices
    outside = ranks - inside
    far_s = size_bytes * outside / ranks / nic_bytes_s + rates.network_latency_s + outside * rates.network_hop_s
    return np.where(ranks <= inside, near_s, np.maximum(near_s, far_s))


def over_nodes(model: ModelConfig, layouts: OneOrMany, rates: Rates, wanted: str = "auto") -> OneOrMany:
    """Return the layouts with `expert_nodes` set by `wanted`, a value of `parallel.expert_all_to_all`.

    With "auto" the two-stage all-to-all is chosen if it is faster for the rows of one microbatch. With "hierarchical"
    it is chosen if the expert ranks fill several nodes evenly.
    """
    moe = model.moe
    if moe is None:
        return layouts
    inside = experts_inside(layouts, rates)
    ranks = layouts.ep * layouts.etp
    nodes = ranks // inside
    possible = (nodes > 1) & (ranks % inside == 0) & (inside % layouts.etp == 0) & (wanted != "flat")
    if wanted == "auto":
        token_bytes = model.sequence_length // layouts.cp * layouts.micro_batch / layouts.tp * model.hidden * 2
        travelling = sum(
            (nodes == number) * nodes_of_a_token(moe.experts, moe.top_k, number) for number in np.unique(nodes).tolist()
        )
        rows_bytes = token_bytes * moe.top_k * layouts.etp
        if moe.capacity is not None:  # a capacity limit also limits the number of sent rows
            travelling = np.minimum(nodes, moe.top_k * moe.capacity)
            rows_bytes = rows_bytes * moe.capacity
        in_two_s = all_to_all_s(token_bytes * travelling, nodes, 1, rates) + all_to_all_s(
            rows_bytes,
            inside,
            inside,
            rates,
        )
        possible &= in_two_s < all_to_all_s(rows_bytes, ranks, inside, rates)
    chosen: Number = np.where(possible, nodes, 1)
    return replace(layouts, expert_nodes=chosen if np.ndim(chosen) else int(chosen))


def run_layout(config: RunConfig, world_size: int, rates: Rates) -> Layout:
    """Return the layout of a run. `rates` gives the nodes' size and speed, which decide its `expert_nodes`."""
    return over_nodes(config.model, layout_of(config, world_size), rates, config.parallel.expert_all_to_all)
