"""Sends tokens to the ranks of their experts and combines the results, with one uneven all-to-all in each direction.

A row is one token for one expert. If etp ranks split an expert's width, the token has one row for each of these ranks.
The outputs of these ranks are summed like the outputs of several experts. Rows are sent sorted by rank and expert. They
arrive sorted by rank, and are then sorted by expert. Dropped choices are not sent.

If a rank has no rows for another rank, it sends one unused row, because RCCL hangs if a rank receives nothing. With a
capacity each pair of ranks exchanges the largest possible number of rows. The host then knows the sizes without waiting
for the device. Unused rows come after the last expert's rows, so they are neither computed nor read.

If the ranks of experts span nodes, tokens are sent in two stages.

A token is first sent once to every node that has some of its experts, and then inside the node to the ranks of these
experts. Messages between nodes stay on a rail: it connects the ranks with the same local rank on each node. So all NICs
work at the same time. The outputs are summed inside the node with the router's weights, so one row per node is sent
back. X-MoE's redundancy bypass (arXiv:2508.13337) differs: it sends a token to the rank of one of these experts, which
is drawn at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from frontier_llm.blueprint.expert_work import most_rows
from frontier_llm.comm import DONE, Axis, Pending, start_all_to_all_into, start_all_to_all_rows
from frontier_llm.ops import Ops
from frontier_llm.ops.routing import gather_rows
from frontier_llm.parallel.expert.numbers import count_numbers, expert_numbers, inverse, slots


class RouterChoice(NamedTuple):
    """Experts that a router has chosen for N tokens."""

    experts_Nk: Tensor
    weights_Nk: Tensor
    dropped_Nk: Tensor | None  # True for choices that are not sent, because they exceed the capacity of their expert
    room: int | None  # capacity: largest number of rows that each expert takes from this rank; None = no limit
    chosen_E: Tensor | None = None  # int64: number of choices of each expert, dropped ones included; None = not counted


@dataclass(frozen=True)
class Dispatch:
    """Plan of the rows that one layer sends and receives for one microbatch, used forward and backward.

    A choice is one (token, chosen expert, part of the expert). Choices are numbered in this order.
    """

    axis: Axis  # Axis of the all-to-all: normally ep, with two stages the rail axis or the node axis.
    ends_E: Tensor  # int32: for each expert of this rank, the index after its last row, in the order of experts.
    # Number of rows to and from each rank of the axis, at least one if the axis has several ranks. The host needs only
    # these numbers.
    sent: list[int]
    received: list[int]
    # For each row in the order of sending: the number of its choice, or -1 for an unused row.
    source: Tensor
    tokens: Tensor  # For each row in the order of sending: the number of its token, or -1.
    # For each choice: its row in the order of sending, or -1 if it is dropped.
    place: Tensor
    # For each row in the order of experts: its index in the order of arrival. None if the axis has one rank, because
    # the orders are then equal.
    arrival: Tensor | None
    homeward: Tensor | None  # Inverse of `arrival`, with -1 for unused rows.
    fan: int  # Number of rows per token: chosen experts per token times etp.
    ops: Ops
    has_unused: bool = True  # False: `source` and `place` contain no -1


def plan_dispatch(
    experts_Nk: Tensor,
    experts: int,
    axis: Axis,
    ops: Ops,
    etp: int = 1,
    dropped_Nk: Tensor | None = None,
    room: int | None = None,
    *,
    chosen_E: Tensor | None = None,
) -> Dispatch:
    """Plan the rows of N tokens from their chosen experts (N, k). Dropped choices are left out.

    `chosen_E` is the number of choices of each expert, if the caller has counted them.

    Collective over the axis. The host waits once for the numbers of rows, after it has queued all work that does not
    need these numbers. If the forward of one microbatch is paired with the backward of another (comm.interleaving), the
    other half of the pair runs before this wait. With `room`, each expert takes at most `room` rows of a rank, and all
    ranks must have the same number of tokens. The host then does not wait: the largest possible number of rows is sent,
    and only `ends_E` determines which rows are used.
    """
    device = experts_Nk.device
    ranks = axis.size
    local = experts * etp // axis.size
    fan = experts_Nk.shape[1] * etp
    slot_A = slots(experts_Nk, dropped_Nk, ranks, local, etp)
    if chosen_E is None or etp > 1 or dropped_Nk is not None:
        leaving_RE = count_numbers(slot_A, ranks * local + 1)[:-1].view(ranks, local)
    else:
        leaving_RE = chosen_E.view(ranks, local)
    if ranks == 1 and dropped_Nk is None and room is None:
        return _plan_of_one_rank(slot_A, leaving_RE[0], axis, fan, ops)
    unknown = room is None
    counts = _RowCounts(leaving_RE, axis, to_host=unknown)
    sorted_A, order = slot_A.sort(stable=True)
    arriving_RE = counts.arrive()
    ends_E = arriving_RE.sum(0).cumsum(0, dtype=torch.int32)
    if unknown and dropped_Nk is None:
        tokens = order // fan
        place = inverse(order)
        sent, received = counts.read()
        if min(*sent, *received) > 0:  # this rank exchanges real rows with every rank, and needs no unused row
            expert_M = expert_numbers(local, ranks, device).repeat_interleave(
                arriving_RE.flatten(), output_size=sum(received)
            )
            arrival = expert_M.argsort(stable=True)
            homeward = inverse(arrival)
            return Dispatch(
                axis, ends_E, sent, received, order, tokens, place, arrival, homeward, fan, ops, has_unused=False
            )

    fewest = 1 if ranks > 1 else 0
    leaving_R = leaving_RE.sum(1)
    arriving_R = arriving_RE.sum(1)
    if room is not None:
        most = max(fewest, most_rows(room, local, *experts_Nk.shape))
        sent_R = received_R = torch.full((ranks,), most, device=device)
    else:
        most = len(order)
        sent_R = leaving_R.clamp(min=fewest)
        received_R = arriving_R.clamp(min=fewest)
    unread_R = sent_R - leaving_R  # number of unused rows for each rank, which follow the used rows for this rank
    rank_A = sorted_A // local
    if dropped_Nk is not None:
        rank_A = rank_A.clamp(max=ranks - 1)
    at_A = torch.arange(len(order), device=device) + (unread_R.cumsum(0) - unread_R)[rank_A]
    if dropped_Nk is not None:
        at_A = at_A.masked_fill(sorted_A == ranks * local, -1)
    place = torch.empty_like(order).index_copy_(0, order, at_A)

    if unknown:
        leaving, arriving = counts.read()
        sent = [max(n, fewest) for n in leaving]
        received = [max(n, fewest) for n in arriving]
        held = sum(arriving)
    else:
        sent = received = [most] * ranks
        held = ranks * most
    end = sum(sent)  # index that dropped choices get; the slice [:end] below removes it
    held_A = at_A if dropped_Nk is None else at_A % (end + 1)
    source = torch.full((end + 1,), -1, device=device).scatter_(0, held_A, order)[:end]
    tokens = source // fan
    if ranks == 1:
        return Dispatch(axis, ends_E, sent, received, source, tokens, place, None, None, fan, ops)
    # Unused rows get the number after the last expert, so that they are sorted after all other rows.
    number = torch.arange(local + 1, device=device).repeat(ranks)
    with_unread = torch.cat((arriving_RE, (received_R - arriving_R)[:, None]), 1).flatten()
    arrival = number.repeat_interleave(with_unread, output_size=sum(received)).argsort(stable=True)
    homeward = torch.empty_like(arrival).index_copy_(0, arrival, torch.arange(len(arrival), device=device))
    homeward = homeward.masked_fill(homeward >= ends_E[-1], -1)
    return Dispatch(axis, ends_E, sent, received, source, tokens, place, arrival[:held], homeward, fan, ops)


def _plan_of_one_rank(slot_A: Tensor, chosen_E: Tensor, axis: Axis, fan: int, ops: Ops) -> Dispatch:
    """Plan rows that stay on this rank: they are sorted by expert, and none is dropped or unused."""
    _let_other_half_run(axis)
    order = slot_A.argsort(stable=True)
    ends_E = chosen_E.cumsum(0, dtype=torch.int32)
    rows = [len(order)]
    place = inverse(order)
    return Dispatch(axis, ends_E, rows, rows, order, order // fan, place, None, None, fan, ops, has_unused=False)


@cache
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that copies numbers of rows to the host. All layers and microbatches of a rank share it.

    With a new stream per call, the streams would use all hardware queues of the device.
    """
    return torch.cuda.Stream(device)


class _RowCounts:
    """Sends the number of rows for each rank and expert to the other ranks and to the host.

    If a forward and a backward run as a pair, the other half of the pair runs while this half's numbers are sent. On a
    GPU a separate stream copies the numbers to the host, so that the host does not wait for the kernels of the other
    half. These kernels keep the device busy while the host starts to send the rows.
    """

    def __init__(self, leaving_RE: Tensor, axis: Axis, to_host: bool) -> None:
        self._here_2RE = torch.stack((leaving_RE, leaving_RE))
        self._axis = axis
        self._read: list[list[int]] | None = None
        self._on_host_2RE = self._here_2RE
        self._aside = _stream_aside(leaving_RE.device) if to_host and leaving_RE.is_cuda else None
        self._copied: torch.cuda.Event | None = None  # end of the copy to the host
        self._pending: Pending = DONE
        if axis.size > 1:
            self._pending = start_all_to_all_into(self._here_2RE[1], leaving_RE, axis)

    def arrive(self) -> Tensor:
        """Return the numbers of rows that this rank receives from each rank for each of its experts, (R, E)."""
        if self._aside is None:
            _let_other_half_run(self._axis)
            self._pending.wait()
        else:
            main = torch.cuda.current_stream(self._aside.device)
            self._aside.wait_stream(main)
            with torch.cuda.stream(self._aside):
                self._pending.wait()
                self._on_host_2RE = torch.empty_like(self._here_2RE, device="cpu", pin_memory=True).copy_(
                    self._here_2RE,
                    non_blocking=True,
                )
                self._copied = self._aside.record_event()
            _let_other_half_run(self._axis)
            main.wait_event(self._copied)
        return self._here_2RE[1]

    def read(self) -> list[list[int]]:
        """Return [number of rows to each rank, number of rows from each rank].

        The host waits until it has these numbers.
        """
        if self._read is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._read = [[sum(experts) for experts in ranks] for ranks in self._on_host_2RE.tolist()]
        return self._read


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


def _let_other_half_run(axis: Axis) -> None:
    """Let the other half of a pair (forward and backward) run while this half's rows or their numbers are sent."""
    if axis.interleaving is not None:
        axis.interleaving.switch_halves()


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
        _let_other_half_run(departure.plan.axis)
        return None, *(
            _add_up(travel.end(), departure.plan, fan) for travel, fan in zip(departure.travels, ctx.fans, strict=True)
        )


class _Arrive(Function):
    """Autograd function that waits for rows in forward, and starts to send their gradients in backward."""

    @staticmethod
    def forward(ctx: Any, departure: Departure, *arriving: Tensor) -> tuple[Tensor, ...]:
        ctx.departure = departure
        _let_other_half_run(departure.plan.axis)
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
        _let_other_half_run(plan.axis)
        return _add_up(travel.end(), plan, plan.fan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        travel = leave(grads[0], ctx.plan)
        _let_other_half_run(ctx.plan.axis)
        rows = arrived(travel, ctx.plan)
        # The paired forward runs while the device sorts these rows. The forward copies its row counts to the host and
        # sends its own rows. With this call, forward and backward each switch three times.
        _let_other_half_run(ctx.plan.axis)
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


class OnNode(NamedTuple):
    """Tokens that this rank has received along the rail, and that it sends to experts inside its node."""

    x_MH: Tensor
    experts_Mk: Tensor  # numbers of the experts within the node, counted from 0
    weights_Mk: Tensor
    elsewhere_Mk: Tensor  # choices to ignore: experts of other nodes, dropped choices, and unused rows


class ToNodes:
    """Sends tokens along the rail to the nodes of their experts: the first of the two stages."""

    def __init__(self, x_NH: Tensor, choice: RouterChoice, experts: int, rail: Axis, ops: Ops) -> None:
        """Begin to send. Collective over the rail, which has one rank in each node.

        Without a capacity the host waits for the numbers of rows.
        """
        experts_Nk, weights_Nk, dropped_Nk, room, _ = choice
        self._nodes = rail
        self._per_node = experts // rail.size
        if dropped_Nk is not None:
            # dropped choices get the number `experts`, which belongs to no expert and therefore to no node
            experts_Nk = experts_Nk.masked_fill(dropped_Nk, experts)
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
