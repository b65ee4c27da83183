"""Comparison of two algorithms for the gradient collectives: one ring over all ranks, or two stages.

RCCL may use a tree instead of the ring. With two stages, one stage runs inside each node and the other between nodes.
Which algorithm is faster depends on the message size and on the number of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frontier_llm.blueprint.layout import DTYPE_BYTES
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.collectives import flat_s, hierarchical_s
from frontier_llm.planner.costs.layouts import ranks_per_node
from frontier_llm.planner.costs.parameters import stage_numel
from frontier_llm.planner.costs.time import stage_layers
from frontier_llm.planner.search import Plan
from frontier_llm.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Choice:
    """One collective over the buckets of gradients or weights, with its predicted seconds by both algorithms."""

    operation: str
    ranks: int
    nodes: int
    size_bytes: float  # size of one bucket on one rank
    flat_s: float
    hierarchical_s: float
    # fewest nodes (a power of two or the complete machine) from which on two stages are faster; None = never
    wins_from_nodes: int | None

    @property
    def words(self) -> str:
        """Text such as 'reduce-scatter in two stages 30 ms (one ring 45 ms; two stages are faster from 4 nodes)'."""
        name = self.operation.replace("_", "-")
        if self.hierarchical_s >= self.flat_s:
            return (
                f"{name} as one ring {format_seconds(self.flat_s)} (two stages {format_seconds(self.hierarchical_s)})"
            )
        start = f"; two stages are faster from {self.wins_from_nodes} nodes" if self.wins_from_nodes else ""
        return (
            f"{name} in two stages {format_seconds(self.hierarchical_s)} (one ring "
            f"{format_seconds(self.flat_s)}{start})"
        )


def node_counts(rates: Rates) -> np.ndarray:
    """Return the numbers of nodes that are compared: 2, 4, 8 … and all nodes of the machine."""
    doubled = [2**power for power in range(1, 15) if 2**power < rates.nodes]
    return np.array([*doubled, rates.nodes], dtype=float)


def times_by_nodes(
    rates: Rates,
    per_node: int,
    sharing: int,
    size_bytes: float,
    operation: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (nodes, seconds as one ring, seconds in two stages) for groups with `per_node` ranks on each node.

    `sharing` such groups use the NICs of a node at the same time.
    """
    nodes = node_counts(rates)
    args = (rates, nodes * per_node, per_node, sharing, size_bytes, operation)
    return nodes, np.asarray(flat_s(*args), dtype=float), np.asarray(hierarchical_s(*args), dtype=float)


def bucket_bytes(plan: Plan, rates: Rates) -> dict[str, float]:
    """Return operation → bytes of one bucket. With FSDP a bucket is one layer.

    The operations are the sum of the gradients and, with ZeRO, the gather of the weights.
    """
    model = plan.model
    layout = plan.layout
    held = float(stage_numel(model, layout.tp, stage_layers(model, layout)[0], True, layout.pp == 1))
    whole_layers = layout.sharding == "weights"
    if whole_layers:
        bucket = float(stage_numel(model, layout.tp, 1, False, False))
    else:
        bucket = min(held, rates.bucket_parameters or held)
    gradient_bytes = DTYPE_BYTES.get(layout.gradient_wire, rates.gradient_bytes)
    gather = {} if layout.sharding == "none" else {"all_gather": bucket * DTYPE_BYTES[layout.dtype]}
    all_reduces = layout.sharding == "none" or (rates.all_reduces_gradients and not whole_layers)
    return {"all_reduce" if all_reduces else "reduce_scatter": bucket * gradient_bytes, **gather}


def gradient_choices(plan: Plan, rates: Rates) -> list[Choice]:
    """Return a Choice for every collective over the data-parallel replicas.

    The list is empty if all replicas are in one node, or if the software stack has no two-stage collectives.
    """
    replicas = plan.layout.replicas
    place = ranks_per_node(plan.layout, rates)
    per_node = int(place.replicas_per_node)
    sharing = int(place.replicas_sharing)
    if not rates.hierarchical or replicas <= per_node:
        return []
    choices = []
    for operation, size in bucket_bytes(plan, rates).items():
        args = (rates, replicas, per_node, sharing, size, operation)
        nodes, flat, staged = times_by_nodes(rates, per_node, sharing, size, operation)
        behind = np.flatnonzero(staged >= flat)
        after = 0 if len(behind) == 0 else behind[-1] + 1
        first = int(nodes[after]) if after < len(nodes) else None
        choices.append(
            Choice(
                operation=operation,
                ranks=replicas,
                nodes=-(-replicas // per_node),
                size_bytes=size,
                flat_s=float(flat_s(*args)),
                hierarchical_s=float(hierarchical_s(*args)),
                wins_from_nodes=first,
            )
        )
    return choices


def gradient_words(plan: Plan, rates: Rates) -> list[str]:
    """Return the report's line about the gradient collectives, or an empty list if there is only one algorithm."""
    choices = gradient_choices(plan, rates)
    if not choices:
        return []
    what = "layers" if plan.layout.sharding == "weights" else "buckets"
    size = " and ".join(format_bytes(one.size_bytes) for one in choices)
    return [f"  gradients: {what} of {size} over {choices[0].nodes} nodes: " + ", ".join(one.words for one in choices)]


def uses_hierarchical(plan: Plan, rates: Rates) -> bool:
    """Return whether two stages are faster for at least one gradient collective of this plan."""
    return any(one.hierarchical_s < one.flat_s for one in gradient_choices(plan, rates))
