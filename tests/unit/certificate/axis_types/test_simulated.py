"""Tests of the simulated ranks: collectives, messages, and ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from frontier_llm.certificate.axis_types.simulated import Deadlock, Exchange, SimulatedGroup
from frontier_llm.certificate.axis_types.trace import Recorder
from frontier_llm.comm import Axis, all_gather, all_reduce_, broadcast_, reduce_scatter, start_all_to_all_rows
from frontier_llm.comm.composed import start_shift


def run(body: Callable[[Axis], Any], ranks: int = 3) -> list[Any]:
    """Return the results of `body` on each rank of an axis. Raises the first error."""
    exchange = Exchange(ranks)
    results: list[Any] = [None] * ranks

    def one(rank: int) -> None:
        everyone = tuple(range(ranks))
        group = SimulatedGroup(exchange, "tp", rank, everyone, Recorder(rank))
        results[rank] = body(Axis("tp", rank, ranks, everyone, group))

    exchange.run([partial(one, rank) for rank in range(ranks)])
    if exchange.failure is not None:
        raise exchange.failure
    return results


def own(axis: Axis) -> Tensor:
    """Return three rows that differ between ranks."""
    return torch.arange(3.0)[:, None] + 10 * axis.rank


def test_collectives_have_the_results_of_their_definitions() -> None:
    everything = torch.cat([torch.arange(3.0)[:, None] + 10 * rank for rank in range(3)])
    total = everything.view(3, 3, 1).sum(0)
    for rank, (gathered, summed, scattered, most, first) in enumerate(
        run(
            lambda axis: (
                all_gather(own(axis), axis),
                all_reduce_(own(axis), axis),
                reduce_scatter(own(axis), axis),
                all_reduce_(own(axis), axis, "max"),
                broadcast_(own(axis), axis, 1),
            )
        )
    ):
        assert torch.equal(gathered, everything)
        assert torch.equal(summed, total)
        assert torch.equal(scattered, total[rank : rank + 1])
        assert torch.equal(most, everything[6:])
        assert torch.equal(first, everything[3:6])


def test_rows_and_messages_arrive_at_their_rank() -> None:
    def body(axis: Axis) -> tuple[Tensor, Tensor]:
        rows, pending = start_all_to_all_rows(own(axis), [1, 1, 1], [1, 1, 1], axis)
        pending.wait()
        incoming, shifting = start_shift(own(axis), axis)
        shifting.wait()
        return rows, incoming

    for rank, (rows, incoming) in enumerate(run(body)):
        assert rows.flatten().tolist() == [rank, 10 + rank, 20 + rank]
        assert incoming[0, 0] == 10 * ((rank - 1) % 3)


def test_a_result_is_not_written_before_the_wait() -> None:
    def body(axis: Axis) -> Tensor:
        x = own(axis)
        assert axis.group is not None
        axis.group.start_all_reduce_(x, "sum")
        return x

    assert run(body)[2][0, 0] == 20  # without wait() the rank still has its own value


def test_ranks_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(Deadlock, match=r"test_simulated.py:\d+"):
        run(lambda axis: axis.rank or all_reduce_(own(axis), axis))
    with pytest.raises(Deadlock, match="different collectives"):
        run(lambda axis: all_reduce_(own(axis), axis) if axis.rank else reduce_scatter(own(axis), axis))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda axis: axis.group.start_all_reduce_(torch.zeros(2, 3).t(), "sum"), "not contiguous"),
        (lambda axis: axis.group.start_all_gather_into(torch.zeros(6), torch.zeros(2).double()), "and the buffer has"),
        (lambda axis: axis.group.start_broadcast_(torch.zeros(2 + axis.rank), 0).wait(), "elements arrive"),
        (lambda axis: all_reduce_(torch.zeros(2, dtype=(torch.half, torch.float)[axis.rank > 0]), axis), "tensors of"),
        (lambda axis: axis.group.start_all_gather_into(torch.zeros(6), torch.zeros(2, device="meta")), "is on meta"),
    ],
)
def test_arguments_that_rccl_would_refuse_or_misread_are_refused(body: Callable[[Axis], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(body)
