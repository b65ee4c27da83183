"""Sends tokens to the ranks of their experts and combines the results, with one uneven all-to-all in each direction.

`parallel/expert/plan.py` plans the rows that are sent.

If the ranks of experts span nodes, tokens are sent in two stages.

A token is first sent once to every node that has some of its experts, and then inside the node to the ranks of these
experts. Messages between nodes stay on a rail: it connects the ranks with the same local rank on each node. So all NICs
work at the same time. The outputs are summed inside the node with the router's weights, so one row per node is sent
back. X-MoE's redundancy bypass (arXiv:2508.13337) differs: it sends a token to the rank of one of these experts, which
is drawn at random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm import DONE, Axis, Pending, start_all_to_all_rows
from frontier_llm.ops import Ops
from frontier_llm.ops.routing import gather_rows
from frontier_llm.parallel.expert.plan import Choices, Dispatch, let_other_half_run, plan_dispatch


class Travel:
    """A running all-to-all that sends rows to the ranks of their experts, or sends the outputs back."""

    def __init__(self, rows: Tensor, plan: Dispatch, back: bool) -> None:
        counts = (plan.sent, plan.received) if back else (plan.received, plan.sent)
        self.leaving = self.arriving = rows
        self._pending: Pending = DONE
        if plan.axis.size > 1:
            self.arriving, self._pending = start_all_to_all_rows(rows, *counts, plan.axis)

    def end(self) -> Tensor:
        """Wait for the rows and return them in the order of arrival."""
        self._pending.wait()
        return self.arriving


def leave(x: Tensor, plan: Dispatch) -> Travel:
    """Begin to send the rows of the tensors `x` to their experts. All tensors in `x` have the same number of rows."""
    fan = _fan(x, plan)
    entries = plan.source if fan == 1 else plan.tokens if fan == plan.fan else plan.source // fan
    return Travel(_gathered(x, entries[:, None], plan), plan, back=False)


def arrived(travel: Travel, plan: Dispatch) -> Tensor:
    """Wait for the rows of this rank's experts and return them in the order of experts."""
    rows = travel.end()
    if plan.arrival is None:
        return rows
    return _gathered(rows, plan.arrival[:, None], plan)


def _gathered(x: Tensor, places_Mf: Tensor, plan: Dispatch) -> Tensor:
    """Gather rows with the op. One-dimensional and integer tensors are gathered with plain torch."""
    if not plan.has_unused and x.dim() == 1 and places_Mf.shape[1] == 1:
        return x[places_Mf[:, 0]]
    by_op = x.dim() == 2 and x.is_floating_point()
    return plan.ops.gather_rows(x, places_Mf) if by_op else gather_rows(x, places_Mf)


def _fan(x: Tensor, plan: Dispatch) -> int:
    return max(len(plan.place), 1) // max(len(x), 1)


def _return(y: Tensor, plan: Dispatch) -> Travel:
    return Travel(y if plan.homeward is None else _gathered(y, plan.homeward[:, None], plan), plan, back=True)


def _add_up(returned: Tensor, plan: Dispatch, fan: int) -> Tensor:
    """Sum the `fan` rows of each token in fp32 (fp64) and round once. The order of the sum is equal on all layouts."""
    return _gathered(returned, plan.place.view(-1, fan), plan)


class _Depart(Function):
    """Autograd function that starts to send rows in forward, and waits for their gradients in backward.

    While the gradients are sent, autograd runs the backward of all work between `_Depart` and `_Arrive`.
    """

    @staticmethod
    def forward(ctx: Any, departure: Departure, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.departure = departure
        ctx.fans = [_fan(x, departure.plan) for x in tensors]
        departure.travels = [leave(x, departure.plan) for x in tensors]
        return tuple(travel.arriving for travel in departure.travels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        departure = ctx.departure  # `grads` are not used: _Arrive.backward has sent the gradients
        let_other_half_run(departure.plan.axis)
        return None, *(
            _add_up(travel.end(), departure.plan, fan) for travel, fan in zip(departure.travels, ctx.fans, strict=True)
        )


class _Arrive(Function):
    """Autograd function that waits for rows in forward, and starts to send their gradients in backward."""

    @staticmethod
    def forward(ctx: Any, departure: Departure, *arriving: Tensor) -> tuple[Tensor, ...]:
        ctx.departure = departure
        let_other_half_run(departure.plan.axis)
        rows = tuple(arrived(travel, departure.plan) for travel in departure.travels)
        departure.travels = []
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        departure = ctx.departure
        departure.travels = [_return(grad, departure.plan) for grad in grads]
        # Autograd requires gradients with the shapes of the inputs, but `_Depart.backward` does not read them. Return
        # the buffers of the sent rows, which exist anyway.
        return None, *(travel.leaving for travel in departure.travels)


class Departure:
    """Handle for rows that are being sent to their experts.

    Work between the constructor and `arrive` overlaps with the transfer of the rows. The backward of this work overlaps
    with the transfer of the rows' gradients.
    """

    travels: list[Travel]  # the running all-to-all of each tensor

    def __init__(self, plan: Dispatch, *tensors: Tensor) -> None:
        """Begin to send the rows of each tensor, which has one or more entries for each token."""
        self.plan = plan
        self._arriving = _Depart.apply(self, *tensors)

    def arrive(self) -> tuple[Tensor, ...]:
        """Wait, and return for each tensor the rows of this rank's experts, in the order of experts."""
        rows: tuple[Tensor, ...] = _Arrive.apply(self, *self._arriving)
        del self._arriving
        return rows


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y_MH: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan = plan
        travel = _return(y_MH, plan)
        let_other_half_run(plan.axis)
        return _add_up(travel.end(), plan, plan.fan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        travel = leave(grads[0], ctx.plan)
        let_other_half_run(ctx.plan.axis)
        rows = arrived(travel, ctx.plan)
        # The paired forward runs while the device sorts these rows. The forward copies its row counts to the host and
        # sends its own rows. With this call, forward and backward each switch three times.
        let_other_half_run(ctx.plan.axis)
        return rows, None


def dispatch(x_NH: Tensor, weights_Nk: Tensor, plan: Dispatch) -> tuple[Tensor, Tensor]:
    """Send tokens to their experts. Returns (x_MH, weights_M), in the order of this rank's experts.

    x_MH are the rows that the experts process, and weights_M are the weights of their outputs.
    """
    x_MH, weights_M = Departure(plan, x_NH, weights_Nk.flatten()).arrive()
    return x_MH, weights_M


def combine(y_MH: Tensor, plan: Dispatch) -> Tensor:
    """Send the outputs of experts back and sum the rows of each token: (M, H) → (N, H)."""
    return _Combine.apply(y_MH, plan)


class ToNodes:
    """Sends tokens along the rail to the nodes of their experts: the first of the two stages."""

    def __init__(self, x_NH: Tensor, weights_Nk: Tensor, choices: Choices, rail: Axis, ops: Ops) -> None:
        """Begin to send. Collective over the rail, which has one rank in each node.

        Without a capacity the host waits for the numbers of rows.
        """
        experts_Nk = choices.experts_Nk
        self._rail = rail
        self._per_node = choices.experts // rail.size
        self._room = choices.room
        if choices.dropped_Nk is not None:
            # dropped choices get the number `experts`, which belongs to no expert and therefore to no node
            experts_Nk = experts_Nk.masked_fill(choices.dropped_Nk, choices.experts)
        node_R = torch.arange(rail.size, device=x_NH.device)
        needed_NR = (experts_Nk[..., None] // self._per_node == node_R).any(1)
        room = None if choices.room is None else choices.room * self._per_node
        nodes = Choices(node_R.expand_as(needed_NR), rail.size, ~needed_NR, room)
        self.plan: Dispatch = plan_dispatch(nodes, rail, ops)
        self._departure = Departure(self.plan, x_NH, weights_Nk)
        self._experts = leave((experts_Nk + 1).int(), self.plan)  # counted from 1, because unused rows contain zeros

    def arrive(self) -> tuple[Tensor, Tensor, Choices]:
        """Wait for the tokens that this rank receives. Returns (x_MH, weights_Mk, choices).

        The choices number the experts within the node from 0. Choices of experts of other nodes, choices that the
        router has dropped, and all choices of unused rows are dropped.
        """
        x_MH, weights_Mk = self._departure.arrive()
        experts_Mk = arrived(self._experts, self.plan).long() - 1
        elsewhere_Mk = experts_Mk // self._per_node != self._rail.rank
        room = None if self._room is None else self._room * self._rail.size  # for the rows of all nodes
        return x_MH, weights_Mk, Choices(experts_Mk % self._per_node, self._per_node, elsewhere_Mk, room)
