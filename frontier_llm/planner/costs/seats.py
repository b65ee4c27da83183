"""Where the ranks of each axis sit, and what replicas share out among them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frontier_llm.blueprint.layout import SHARDING, Layout
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.layouts import Layouts, Number


@dataclass(frozen=True)
class Seats:
    """Where the ranks of each axis sit: how many share a node, and who shares the NICs."""

    cp_per_node: Number
    replicas_per_node: Number  # of dp x cp
    replicas_sharing: Number  # groups of replicas of one node that reduce at the same time
    pp_inside: Number  # 1 = pipeline neighbours sit in the same node
    pp_sharing: Number  # devices of a node that send at the same time


def seats(layouts: Layout, rates: Rates) -> Seats:
    """tp innermost, then cp; then dp (tp-dp-pp) or pp (tp-pp-dp). A node is filled in that order."""
    node = rates.node_devices
    tp = layouts.tp
    cp = layouts.cp
    pp = layouts.pp
    dp = layouts.dp
    tp_inside = np.minimum(tp, node)
    cp_inside = np.minimum(cp, np.maximum(node / tp_inside, 1.0))
    room = np.maximum(node / (tp_inside * cp_inside), 1.0)
    dp_outer = layouts.axis_order == "tp-pp-dp"
    stages_inside = np.where(
        dp_outer, np.minimum(pp, room), np.where(tp * cp * dp < node, np.minimum(pp, node / (tp * cp * dp)), 1.0)
    )
    replicas = np.where(dp_outer, np.maximum(np.minimum(dp, room / stages_inside), 1.0), np.minimum(dp, room))
    replicas = replicas * cp_inside
    per_node = np.minimum(node, tp * cp * pp * dp)
    return Seats(cp_inside, replicas, np.maximum(per_node / replicas, 1.0), stages_inside > 1, per_node)


def cut(layouts: Layout, stage: int) -> Number:
    """Whether replicas share out what this stage of ZeRO does: 1 optimizer state, 2 gradients, 3 weights."""
    if not isinstance(layouts, Layouts):
        return SHARDING[layouts.sharding] >= stage
    return np.logical_or.reduce([layouts.sharding == name for name, reached in SHARDING.items() if reached >= stage])
