"""Plans which rows are sent to the ranks of their experts, and in which order.

A row is one token for one expert. If etp ranks split an expert's width, the token has one row for each of these ranks.
The outputs of these ranks are summed like the outputs of several experts. Rows are sent sorted by rank and expert. They
arrive sorted by rank, and are then sorted by expert. Dropped choices are not sent.

If a rank has no rows for another rank, it sends one unused row, because RCCL hangs if a rank receives nothing. With a
capacity each pair of ranks exchanges the largest possible number of rows. The host then knows the sizes without waiting
for the device. Unused rows come after the last expert's rows, so they are neither computed nor read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from frontier_llm.blueprint.expert_work import most_rows
from frontier_llm.comm import DONE, Axis, Pending, start_all_to_all_into
from frontier_llm.ops import Ops
from frontier_llm.parallel.expert.numbers import count_numbers, expert_numbers, inverse, slots


class Choices(NamedTuple):
    """The experts that the router has chosen: k experts for each of N tokens."""

    experts_Nk: Tensor
    experts: int  # number of experts to choose from
    dropped_Nk: Tensor | None = None  # True for choices that are not sent; None = all are sent
    room: int | None = None  # capacity: largest number of rows that each expert takes from this rank; None = no limit
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


class _SortedChoices(NamedTuple):
    """Choices in the order of sending, and the numbers of rows for each rank and each of its experts."""

    slot_A: Tensor  # index of (rank, expert of the rank), ascending; dropped choices have the index after the last one
    order_A: Tensor  # number of the choice
    leaving_RE: Tensor
    arriving_RE: Tensor
    ends_E: Tensor  # see `Dispatch`
    has_dropped: bool
    fan: int
    axis: Axis
    ops: Ops


def plan_dispatch(choices: Choices, axis: Axis, ops: Ops, etp: int = 1) -> Dispatch:
    """Plan the rows of N tokens from their chosen experts. Dropped choices are left out.

    Collective over the axis. The host waits once for the numbers of rows, after it has queued all work that does not
    need these numbers. If the forward of one microbatch is paired with the backward of another (comm.interleaving), the
    other half of the pair runs before this wait. With `room`, each expert takes at most `room` rows of a rank, and all
    ranks must have the same number of tokens. The host then does not wait: the largest possible number of rows is sent,
    and only `ends_E` determines which rows are used.
    """
    ranks = axis.size
    local = choices.experts * etp // ranks
    fan = choices.experts_Nk.shape[1] * etp
    has_dropped = choices.dropped_Nk is not None
    slot_A = slots(choices.experts_Nk, choices.dropped_Nk, ranks, local, etp)
    if choices.chosen_E is None or etp > 1 or has_dropped:
        leaving_RE = count_numbers(slot_A, ranks * local + 1)[:-1].view(ranks, local)
    else:
        leaving_RE = choices.chosen_E.view(ranks, local)
    is_limited = choices.room is not None
    if ranks == 1 and not has_dropped and not is_limited:
        return _plan_of_one_rank(slot_A, leaving_RE[0], axis, fan, ops)
    counts = _RowCounts(leaving_RE, axis, to_host=not is_limited)
    sorted_A, order_A = slot_A.sort(stable=True)
    arriving_RE = counts.arrive()
    ends_E = arriving_RE.sum(0).cumsum(0, dtype=torch.int32)
    rows = _SortedChoices(sorted_A, order_A, leaving_RE, arriving_RE, ends_E, has_dropped, fan, axis, ops)
    if choices.room is not None:
        most = max(_fewest(axis), most_rows(choices.room, local, *choices.experts_Nk.shape))
        return _plan_with_unused(rows, counts, most)
    plan = None if has_dropped else _plan_without_unused(rows, counts)
    return _plan_with_unused(rows, counts) if plan is None else plan


def _fewest(axis: Axis) -> int:
    """Return the smallest number of rows that a rank may send to another rank."""
    return 1 if axis.size > 1 else 0


def _plan_of_one_rank(slot_A: Tensor, chosen_E: Tensor, axis: Axis, fan: int, ops: Ops) -> Dispatch:
    """Plan rows that stay on this rank: they are sorted by expert, and none is dropped or unused."""
    let_other_half_run(axis)
    order = slot_A.argsort(stable=True)
    ends_E = chosen_E.cumsum(0, dtype=torch.int32)
    rows = [len(order)]
    place = inverse(order)
    return Dispatch(axis, ends_E, rows, rows, order, order // fan, place, None, None, fan, ops, has_unused=False)


def _plan_without_unused(rows: _SortedChoices, counts: _RowCounts) -> Dispatch | None:
    """Plan the rows if no choice is dropped and no unused row is needed. Return None if this rank needs one."""
    order_A = rows.order_A
    ranks, local = rows.leaving_RE.shape
    tokens = order_A // rows.fan
    place = inverse(order_A)
    sent, received = counts.read()
    if min(*sent, *received) == 0:
        return None
    number = expert_numbers(local, ranks, order_A.device)
    expert_M = number.repeat_interleave(rows.arriving_RE.flatten(), output_size=sum(received))
    arrival = expert_M.argsort(stable=True)
    return Dispatch(
        axis=rows.axis,
        ends_E=rows.ends_E,
        sent=sent,
        received=received,
        source=order_A,
        tokens=tokens,
        place=place,
        arrival=arrival,
        homeward=inverse(arrival),
        fan=rows.fan,
        ops=rows.ops,
        has_unused=False,
    )


def _plan_with_unused(rows: _SortedChoices, counts: _RowCounts, most: int | None = None) -> Dispatch:
    """Plan rows with unused rows between them. With `most`, each pair of ranks exchanges this number of rows."""
    ranks = rows.axis.size
    fewest = _fewest(rows.axis)
    leaving_R = rows.leaving_RE.sum(1)
    arriving_R = rows.arriving_RE.sum(1)
    if most is None:
        sent_R = leaving_R.clamp(min=fewest)
        received_R = arriving_R.clamp(min=fewest)
    else:
        sent_R = received_R = torch.full((ranks,), most, device=leaving_R.device)
    at_A = _places(rows, sent_R - leaving_R)
    place = torch.empty_like(rows.order_A).index_copy_(0, rows.order_A, at_A)
    if most is None:
        leaving, arriving = counts.read()
        sent = [max(n, fewest) for n in leaving]
        received = [max(n, fewest) for n in arriving]
        held = sum(arriving)
    else:
        sent = received = [most] * ranks
        held = ranks * most
    source = _sources(rows, at_A, sum(sent))
    arrival = None
    homeward = None
    if ranks > 1:
        by_expert, homeward = _order_of_experts(rows, received_R - arriving_R, sum(received))
        arrival = by_expert[:held]
    return Dispatch(
        axis=rows.axis,
        ends_E=rows.ends_E,
        sent=sent,
        received=received,
        source=source,
        tokens=source // rows.fan,
        place=place,
        arrival=arrival,
        homeward=homeward,
        fan=rows.fan,
        ops=rows.ops,
    )


def _places(rows: _SortedChoices, unused_R: Tensor) -> Tensor:
    """Return for each sorted choice its row in the order of sending, or -1 if it is dropped.

    `unused_R` is the number of unused rows for each rank. They follow the used rows for this rank.
    """
    ranks, local = rows.leaving_RE.shape
    rank_A = rows.slot_A // local
    if rows.has_dropped:
        rank_A = rank_A.clamp(max=ranks - 1)
    index_A = torch.arange(len(rank_A), device=rank_A.device)
    at_A = index_A + (unused_R.cumsum(0) - unused_R)[rank_A]
    return at_A.masked_fill(rows.slot_A == ranks * local, -1) if rows.has_dropped else at_A


def _sources(rows: _SortedChoices, at_A: Tensor, count: int) -> Tensor:
    """Return the number of the choice of each of the `count` sent rows, or -1. `at_A` is the result of `_places`."""
    if rows.has_dropped:
        at_A = at_A % (count + 1)  # dropped choices get the index `count`, which the slice below removes
    return torch.full((count + 1,), -1, device=at_A.device).scatter_(0, at_A, rows.order_A)[:count]


def _order_of_experts(rows: _SortedChoices, unused_R: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the order of experts of the `count` received rows, and its inverse with -1 for unused rows.

    `unused_R` is the number of unused rows from each rank. They get the number after the last expert, so that they are
    sorted after all other rows.
    """
    ranks, local = rows.arriving_RE.shape
    number = torch.arange(local + 1, device=unused_R.device).repeat(ranks)
    with_unused = torch.cat((rows.arriving_RE, unused_R[:, None]), 1).flatten()
    arrival = number.repeat_interleave(with_unused, output_size=count).argsort(stable=True)
    index = torch.arange(len(arrival), device=arrival.device)
    homeward = torch.empty_like(arrival).index_copy_(0, arrival, index)
    return arrival, homeward.masked_fill(homeward >= rows.ends_E[-1], -1)


def let_other_half_run(axis: Axis) -> None:
    """Let the other half of a pair (forward and backward) run while this half's rows or their numbers are sent."""
    if axis.interleaving is not None:
        axis.interleaving.switch_halves()


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
            let_other_half_run(self._axis)
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
            let_other_half_run(self._axis)
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
