"""Tokens to their experts and back: only routed rows travel, sorted by expert, in one uneven all-to-all each way.

A row is one token on its way to one expert (with etp ranks per expert, one for each of them, which hold parts of its
width: their outputs are summed like those of several experts). Rows leave sorted by rank and expert; they arrive sorted
by rank and are put in the order of the experts. Where two ranks have nothing for each other one row travels that nobody
reads, because RCCL hangs where a rank receives nothing. With a capacity as many rows travel between any two ranks as
their experts may take, so that the host knows the sizes without waiting for the device; those that are not needed stand
behind all others, past the last expert's end, where they are neither computed nor read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from frontier_llm.blueprint.expert_work import most_rows
from frontier_llm.comm import DONE, Axis, Pending, start_all_to_all_into, start_all_to_all_rows
from frontier_llm.ops import Ops
from frontier_llm.ops.groups import gather_rows


class RouterChoice(NamedTuple):
    """What a router has chosen for N tokens."""

    experts_Nk: Tensor
    weights_Nk: Tensor
    dropped_Nk: Tensor | None  # which of them stay at home, because their expert has no more room
    room: int | None  # rows that each expert takes of this rank's; None = all


@dataclass(frozen=True)
class Dispatch:
    """Which row goes where, for one microbatch and layer: made once, read forward and backward."""

    axis: Axis  # ep
    ends_E: Tensor  # int32: of each expert of this rank the row past its last, among those that it works on
    # rows to each rank of the axis, at least one; with the next the only numbers that the host must know
    sent: list[int]
    received: list[int]  # rows from each
    # of each row that is sent, in the order of sending: its number among (token, chosen expert, part of the expert), or
    # -1
    source: Tensor
    # of each such number: where it stands in the order of sending; -1 stays at home, beyond an expert's capacity
    place: Tensor
    # of each row that an expert works on, by expert: where it stands in the order of arriving; None: rows stay at home
    arrival: Tensor | None
    homeward: Tensor | None  # the other way round; -1 for what nobody has read
    fan: int  # rows of a token: experts that it goes to, times etp
    ops: Ops


def beyond_capacity(experts_Nk: Tensor, weights_Nk: Tensor, experts: int, room: int) -> Tensor:
    """Which choices an expert that takes `room` rows leaves out, (N, k): those of the smallest weights."""
    experts_A = experts_Nk.flatten()
    by_weight = weights_Nk.detach().flatten().argsort(descending=True, stable=True)
    order = by_weight[experts_A[by_weight].argsort(stable=True)]  # by expert, and then by weight
    counts_E = _counts(experts_A, experts)
    first_A = (counts_E.cumsum(0) - counts_E)[experts_A[order]]
    late = torch.arange(len(order), device=order.device) - first_A >= room
    return torch.empty_like(late).index_copy_(0, order, late).view(experts_Nk.shape)


def plan_dispatch(
    experts_Nk: Tensor,
    experts: int,
    axis: Axis,
    ops: Ops,
    etp: int = 1,
    dropped_Nk: Tensor | None = None,
    room: int | None = None,
) -> Dispatch:
    """Where the rows of N tokens go, given their chosen experts, but for what is dropped.

    Collective over the axis. The host waits for the numbers of rows once, after all is under way that does not need
    them, and in a pair after the other's turn. With `room` rows at most for each expert, and as many tokens on every
    rank, it does not wait: as many rows travel as there may be, and the ends alone say how many count.
    """
    device = experts_Nk.device
    ranks = axis.size
    local = experts * etp // axis.size
    part = torch.arange(etp, device=device)
    # of each row the rank and, within it, the expert: neighbours of etp ranks hold the same experts; what is dropped
    # stands past the last
    slot_A = (((experts_Nk // local)[..., None] * etp + part) * local + (experts_Nk % local)[..., None]).flatten()
    if dropped_Nk is not None:
        slot_A = slot_A.masked_fill(dropped_Nk[..., None].expand(*dropped_Nk.shape, etp).flatten(), ranks * local)
    leaving_RE = _counts(slot_A, ranks * local + 1)[:-1].view(ranks, local)
    unknown = room is None and (ranks > 1 or dropped_Nk is not None)
    counts = _RowCounts(leaving_RE, axis, to_host=unknown)
    order = slot_A.argsort(stable=True)
    arriving_RE = counts.arrive()
    ends_E = arriving_RE.sum(0).cumsum(0, dtype=torch.int32)

    fewest = 1 if ranks > 1 else 0
    if room is not None:
        most = max(fewest, most_rows(room, local, *experts_Nk.shape))
        sent_R = received_R = torch.full((ranks,), most, device=device)
    else:
        most = len(order)
        sent_R = leaving_RE.sum(1).clamp(min=fewest)
        received_R = arriving_RE.sum(1).clamp(min=fewest)
    unread_R = sent_R - leaving_RE.sum(1)  # they stand behind what is read by the same rank
    sorted_A = slot_A[order]
    at_A = (
        torch.arange(len(order), device=device)
        + (unread_R.cumsum(0) - unread_R)[(sorted_A // local).clamp(max=ranks - 1)]
    )
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
    end = sum(sent)  # where what is dropped goes, to be cut off
    source = torch.full((end + 1,), -1, device=device).scatter_(0, at_A % (end + 1), order)[:end]
    fan = experts_Nk.shape[1] * etp
    if ranks == 1:
        return Dispatch(axis, ends_E, sent, received, source, place, None, None, fan, ops)
    # rows that nobody reads count as an expert past the last, so that they stand behind all others
    number = torch.arange(local + 1, device=device).repeat(ranks)
    with_unread = torch.cat((arriving_RE, (received_R - arriving_RE.sum(1))[:, None]), 1).flatten()
    arrival = number.repeat_interleave(with_unread, output_size=sum(received)).argsort(stable=True)
    homeward = torch.empty_like(arrival).index_copy_(0, arrival, torch.arange(len(arrival), device=device))
    homeward = homeward.masked_fill(homeward >= ends_E[-1], -1)
    return Dispatch(axis, ends_E, sent, received, source, place, arrival[:held], homeward, fan, ops)


def _counts(numbers_A: Tensor, count: int) -> Tensor:
    """How often each number below `count` is there. A bincount would look for the largest, for which the host waits."""
    return numbers_A.new_zeros(count).scatter_add_(0, numbers_A, torch.ones_like(numbers_A))


class _RowCounts:
    """How many rows go from each rank to each expert, on their way to the ranks and to the host.

    In a pair it is the other's turn meanwhile. A GPU's host gets them by a stream of their own: so it does not wait for
    what the other half has queued, which keeps the device busy while the host sends the rows off.
    """

    def __init__(self, leaving_RE: Tensor, axis: Axis, to_host: bool) -> None:
        self._here_2RE = torch.stack((leaving_RE, leaving_RE))
        self._axis = axis
        self._on_host_2RE = self._here_2RE
        self._aside = torch.cuda.Stream(leaving_RE.device) if to_host and leaving_RE.is_cuda else None
        self._pending: Pending = DONE
        if axis.size > 1:
            self._pending = start_all_to_all_into(self._here_2RE[1], leaving_RE, axis)

    def arrive(self) -> Tensor:
        """Those of the rows that come to this rank, (R, E)."""
        if self._aside is None:
            _meanwhile(self._axis)
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
            _meanwhile(self._axis)
            main.wait_stream(self._aside)
        return self._here_2RE[1]

    def read(self) -> list[list[int]]:
        """[rows to each rank, rows from each], for which the host waits."""
        if self._aside is not None:
            self._aside.synchronize()
        sums: list[list[int]] = self._on_host_2RE.sum(-1).tolist()
        return sums


class Travel:
    """Rows on their way to the ranks of their experts, or back."""

    def __init__(self, rows: Tensor, plan: Dispatch, back: bool) -> None:
        counts = (plan.sent, plan.received) if back else (plan.received, plan.sent)
        self.leaving = self.arriving = rows
        self._pending: Pending = DONE
        if plan.axis.size > 1:
            self.arriving, self._pending = start_all_to_all_rows(rows, *counts, plan.axis)

    def end(self) -> Tensor:
        """What has arrived."""
        self._pending.wait()
        return self.arriving


def _meanwhile(axis: Axis) -> None:
    """Rows or their numbers are on their way: in a pair of microbatches it is the other's turn."""
    if axis.baton is not None:
        axis.baton.pass_on()


def leave(x: Tensor, plan: Dispatch) -> Travel:
    """Each of x's entries stands for as many rows as all others."""
    return Travel(_gathered(x, (plan.source // _fan(x, plan))[:, None], plan), plan, back=False)


def arrived(travel: Travel, plan: Dispatch) -> Tensor:
    """The rows of this rank's experts, in their order."""
    rows = travel.end()
    if plan.arrival is None:
        return rows
    return _gathered(rows, plan.arrival[:, None], plan)


def _gathered(x: Tensor, places_Mf: Tensor, plan: Dispatch) -> Tensor:
    """By the op; choices and rows of one number by plain torch."""
    by_op = x.dim() == 2 and x.is_floating_point()
    return plan.ops.gather_rows(x, places_Mf) if by_op else gather_rows(x, places_Mf)


def _fan(x: Tensor, plan: Dispatch) -> int:
    return max(len(plan.place), 1) // max(len(x), 1)


def _return(y: Tensor, plan: Dispatch) -> Travel:
    return Travel(y if plan.homeward is None else _gathered(y, plan.homeward[:, None], plan), plan, back=True)


def _add_up(returned: Tensor, plan: Dispatch, fan: int) -> Tensor:
    """The sum of each entry's `fan` rows, in one order whatever the layout; in fp32 (fp64), rounded once."""
    return _gathered(returned, plan.place.view(-1, fan), plan)


class _Depart(Function):
    """The half of a dispatch that begins forward and ends backward; autograd runs in between what forward has
    computed in between.
    """

    @staticmethod
    def forward(ctx: Any, departure: Departure, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.departure = departure
        ctx.fans = [_fan(x, departure.plan) for x in tensors]
        departure.travels = [leave(x, departure.plan) for x in tensors]
        return tuple(travel.arriving for travel in departure.travels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        departure = ctx.departure  # `grads` are the rows that have left, see _Arrive
        _meanwhile(departure.plan.axis)
        return None, *(
            _add_up(travel.end(), departure.plan, fan) for travel, fan in zip(departure.travels, ctx.fans, strict=True)
        )


class _Arrive(Function):
    """The other half: ends forward and begins backward."""

    @staticmethod
    def forward(ctx: Any, departure: Departure, *arriving: Tensor) -> tuple[Tensor, ...]:
        ctx.departure = departure
        _meanwhile(departure.plan.axis)
        rows = tuple(arrived(travel, departure.plan) for travel in departure.travels)
        departure.travels = []
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        departure = ctx.departure
        departure.travels = [_return(grad, departure.plan) for grad in grads]
        # autograd wants tensors of the arriving ones' shapes; these have to live anyway
        return None, *(travel.leaving for travel in departure.travels)


class Departure:
    """Rows that have left for their experts; whatever is computed before they are waited for runs beside them, and
    so does its backward.
    """

    travels: list[Travel]  # under way

    def __init__(self, plan: Dispatch, *tensors: Tensor) -> None:
        """Each tensor has one or more entries for each token."""
        self.plan = plan
        self._arriving = _Depart.apply(self, *tensors)

    def arrive(self) -> tuple[Tensor, ...]:
        """Of each tensor the rows of this rank's experts, in their order."""
        rows: tuple[Tensor, ...] = _Arrive.apply(self, *self._arriving)
        del self._arriving
        return rows


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y_MH: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan = plan
        travel = _return(y_MH, plan)
        _meanwhile(plan.axis)
        return _add_up(travel.end(), plan, plan.fan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        travel = leave(grads[0], ctx.plan)
        _meanwhile(ctx.plan.axis)
        rows = arrived(travel, ctx.plan)
        # as they are put in order, the other half reads its numbers of rows and sends these: forward and backward take
        # three turns each
        _meanwhile(ctx.plan.axis)
        return rows, None


def dispatch(x_NH: Tensor, weights_Nk: Tensor, plan: Dispatch) -> tuple[Tensor, Tensor]:
    """(x_MH, weights_M): the rows that this rank's experts work on, in their order, and what each row's output
    counts.
    """
    x_MH, weights_M = Departure(plan, x_NH, weights_Nk.flatten()).arrive()
    return x_MH, weights_M


def combine(y_MH: Tensor, plan: Dispatch) -> Tensor:
    """(M, H) → (N, H): every token's rows, back where it came from, summed."""
    return _Combine.apply(y_MH, plan)
