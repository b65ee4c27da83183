"""Dispatch in two stages, if the ranks of experts span nodes.

Each token is sent once to every node that has some of its experts, and inside the node to the ranks of these experts.
Between nodes it stays on its rail, which connects the ranks at the same place of each node. So all NICs work at the
same time. The outputs are summed inside the node with the router's weights, so one row per node is sent back. X-MoE's
redundancy bypass (arXiv:2508.13337) sends to the rank of one of the experts instead, which is drawn at random.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from frontier_llm.comm import Axis
from frontier_llm.ops import Ops
from frontier_llm.parallel.expert.dispatch import Departure, Dispatch, RouterChoice, arrived, leave, plan_dispatch


class OnNode(NamedTuple):
    """Tokens that this rank has received and distributes inside its node."""

    x_MH: Tensor
    experts_Mk: Tensor  # numbers of experts inside the node, from 0
    weights_Mk: Tensor
    elsewhere_Mk: Tensor  # choices to ignore: experts of other nodes, dropped choices, and unused rows


class ToNodes:
    """Tokens under way along the rail to the nodes of their experts."""

    def __init__(self, x_NH: Tensor, choice: RouterChoice, experts: int, rail: Axis, ops: Ops) -> None:
        """Begin to send. Collective over the rail, which has one rank in each node.

        Without a capacity the host waits for the numbers of rows.
        """
        experts_Nk, weights_Nk, dropped_Nk, room = choice
        self._nodes = rail
        self._per_node = experts // rail.size
        if dropped_Nk is not None:
            experts_Nk = experts_Nk.masked_fill(dropped_Nk, experts)  # the number after the last belongs to no node
        node_R = torch.arange(rail.size, device=x_NH.device)
        needed_NR = (experts_Nk[..., None] // self._per_node == node_R).any(1)
        room = None if room is None else room * self._per_node
        self.plan: Dispatch = plan_dispatch(node_R.expand_as(needed_NR), rail.size, rail, ops, 1, ~needed_NR, room)
        self._departure = Departure(self.plan, x_NH, weights_Nk)
        self._experts = leave((experts_Nk + 1).int(), self.plan)  # counted from 1, because unused rows contain zeros

    def arrive(self) -> OnNode:
        """Wait for the tokens that this rank receives."""
        x_MH, weights_Mk = self._departure.arrive()
        experts_Mk = arrived(self._experts, self.plan).long() - 1
        elsewhere_Mk = experts_Mk // self._per_node != self._nodes.rank
        return OnNode(x_MH, experts_Mk % self._per_node, weights_Mk, elsewhere_Mk)
