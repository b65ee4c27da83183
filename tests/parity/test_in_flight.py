"""The numbers are equal with one communication in flight per rank and with many. The ledger records the difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from frontier_llm.training.step import train_step
from tests.harness.marks import exhaustive
from tests.harness.pool import RankPool
from tests.parity.cases import Case
from tests.parity.three_steps import build

LAYOUTS = [
    Case("gpt", dp=2, bucket_elements=500),
    Case("llama", tp=2, sequence_parallel=True, tensor_chunks=2),
    Case("llama", tp=2, pp=2, dp=2, bucket_elements=500, overlap_weights=True),
    Case("llama", tp=2, pp=2, sequence_parallel=True, schedule="zb-h1", transport="torch"),
    Case("gpt", pp=2, dp=2, schedule="interleaved", transport="torch", bucket_elements=500),
    Case("llama", dp=2, bucket_elements=500, settings=("precision.gradient_wire=bf16",)),
]


def trained(rank: int, case: Case) -> tuple[list[float], list[torch.Tensor], int]:
    """Return the losses and gradient norms of three steps, and this rank's weights after them.

    The third value is the largest number of communications in flight.
    """
    state = build(rank, case, "fp32")
    results = [train_step(state) for _ in range(3)]
    state.optimizer.wait_for_gather()
    weights = [weight.clone() for _, weight in state.optimizer.weights()]
    return (
        [number for result in results for number in (result.loss, result.gradient_norm)],
        weights,
        state.mesh.ledger.most_in_flight,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("case", [LAYOUTS[3], *map(exhaustive, LAYOUTS[:3] + LAYOUTS[4:])], ids=str)
def test_one_in_flight_computes_what_many_do(ranks: RankPool, case: Case) -> None:
    many = ranks.run(case.world_size, trained, replace(case, settings=(*case.settings, "comm.in_flight=many")))
    one = ranks.run(case.world_size, trained, replace(case, settings=(*case.settings, "comm.in_flight=one")))
    for (numbers, weights, most), (expected, others, _) in zip(one, many, strict=True):
        assert most == 1
        assert numbers == expected
        assert all(map(torch.equal, weights, others))
    assert max(most for *_, most in many) > 1
