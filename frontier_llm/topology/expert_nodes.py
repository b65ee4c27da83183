"""Seconds of rows on their way to experts and back: where the ranks of experts sit, and whether rows go in one stage
or in two.
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
    """Ranks of ep, and of etp in it, that share a node: they follow tp and cp, and then the replicas, which a
    pipeline may stand between.
    """
    inner = layouts.tp * layouts.cp
    node = rates.node_devices
    apart = np.where(layouts.axis_order == "tp-pp-dp", np.maximum(inner * layouts.pp, 1), inner)
    together = np.minimum(node, inner * np.maximum(node // apart, 1))
    return np.minimum(layouts.ep * layouts.etp, together)


def experts_s(collective: Collective, layout: Layout, rates: Rates) -> float:
    """An all-to-all of rows, nothing beside it: among all ranks, among those of a node, or along a rail."""
    ranks = layout.ep * layout.etp
    inside = int(experts_inside(layout, rates))
    among, together = {"ep": (ranks, inside), "ep.node": (inside, inside), "ep.rail": (layout.expert_nodes, 1)}[
        collective.axis
    ]
    return float(all_to_all_s(collective.size_bytes, among, together, rates))


def all_to_all_s(size_bytes: Number, ranks: Number, inside: Number, rates: Rates) -> Number:
    """Among ranks that fill nodes: what stays inside takes the fabric while the rest takes this rank's NICs.

    Every rank has a message for every other; those that are small pay for their number.
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
    """With `expert_nodes` as `parallel.expert_all_to_all` asks; for auto in two stages where a microbatch's rows
    travel faster so.
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
        if moe.capacity is not None:  # as many travel as may
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
    """The layout of a run on nodes like these."""
    return over_nodes(config.model, layout_of(config, world_size), rates, config.parallel.expert_all_to_all)
