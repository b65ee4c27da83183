"""Two stages where the ranks of experts span nodes: each token once to every node that has some of its experts, and
from there to their ranks.

Along its rail, from the rank of the same place on its own node, so that all NICs work at once. What comes back is
summed in the node, with the router's weights: one row for each node again. X-MoE's redundancy bypass (arXiv:2508.13337)
sends to one of the experts' ranks instead, drawn at random.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from frontier_llm.comm import Axis
from frontier_llm.ops import Ops
from frontier_llm.parallel.expert.dispatch import Departure, Dispatch, RouterChoice, arrived, leave, plan_dispatch


class OnNode(NamedTuple):
    """Tokens that have come to this rank to be shared out in its node."""

    x_MH: Tensor
    experts_Mk: Tensor  # counted from the node's first
    weights_Mk: Tensor
    elsewhere_Mk: Tensor  # choices that are no expert of this node, dropped, or of a row that is no token


class ToNodes:
    """Tokens on their way to nodes."""

    def __init__(self, x_NH: Tensor, choice: RouterChoice, experts: int, rail: Axis, ops: Ops) -> None:
        """Collective over the rail, which has one rank in each node; without a capacity the host waits for the
        numbers of rows.
        """
        experts_Nk, weights_Nk, dropped_Nk, room = choice
        self._nodes = rail
        self._per_node = experts // rail.size
        if dropped_Nk is not None:
            experts_Nk = experts_Nk.masked_fill(dropped_Nk, experts)  # past the last: of no node
        node_R = torch.arange(rail.size, device=x_NH.device)
        needed_NR = (experts_Nk[..., None] // self._per_node == node_R).any(1)
        room = None if room is None else room * self._per_node
        self.plan: Dispatch = plan_dispatch(node_R.expand_as(needed_NR), rail.size, rail, ops, 1, ~needed_NR, room)
        self._departure = Departure(self.plan, x_NH, weights_Nk)
        self._experts = leave((experts_Nk + 1).int(), self.plan)  # from 1: a row that is no token has zeros

    def arrive(self) -> OnNode:
        """Wait for what comes to this rank."""
        x_MH, weights_Mk = self._departure.arrive()
        experts_Mk = arrived(self._experts, self.plan).long() - 1
        elsewhere_Mk = experts_Mk // self._per_node != self._nodes.rank
        return OnNode(x_MH, experts_Mk % self._per_node, weights_Mk, elsewhere_Mk)
