"""Number of times that the host reads a number from the device between the router and the experts' sum.

On a GPU the host then waits for all queued work.
"""

from __future__ import annotations

import pytest
import torch

from frontier_llm.model.experts import MixtureOfExperts
from frontier_llm.ops.native import load_cpu_library
from tests.harness.pool import RankPool
from tests.harness.waits import Waits
from tests.parity.cases import Case
from tests.parity.three_steps import build

pytestmark = pytest.mark.skipif(bool(load_cpu_library()), reason="scripts/build_native.sh")


def waits(rank: int, case: Case) -> tuple[list[str], list[str]]:
    """Return the waits of one layer's forward and of its backward, with the C++ ops in fp32."""
    state = build(rank, case, "fp32")
    layer = next(module for module in state.stages[0].modules() if isinstance(module, MixtureOfExperts))
    state.sync.begin()
    x = torch.randn(12, case.micro_batch, 32, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    with Waits() as forward:
        y, routed = layer(x)
    # Rows are dropped if there is a capacity.
    assert y.isfinite().all() and (routed.dropped > 0 if layer.router.moe.capacity else routed.dropped is None)
    with Waits() as backward:
        (y.sum() + routed.balance).backward()
    assert x.grad is not None and x.grad.isfinite().all()
    return forward.names, backward.names


def experts(ep: int, *more: str) -> tuple[str, ...]:
    return (f"parallel.expert={ep}", "ops.experts=cpu", *more)


HIERARCHICAL = "parallel.expert_all_to_all=hierarchical"
CAPACITY = "model.moe.capacity=0.75"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("deepseek", dp=2, settings=experts(2, CAPACITY)), []),
        (Case("olmoe", dp=4, settings=experts(4, CAPACITY, HIERARCHICAL), ranks_per_node=2), []),
        (Case("olmoe", dp=4, settings=experts(4, CAPACITY, HIERARCHICAL), ranks_per_node=1), []),
        (Case("olmoe", settings=experts(1, CAPACITY)), []),
        (Case("olmoe", settings=experts(1)), []),
        (Case("deepseek", dp=2, settings=experts(2)), ["tolist"]),
        (Case("olmoe", dp=4, settings=experts(4, HIERARCHICAL), ranks_per_node=2), ["tolist"] * 2),
    ],
    ids=str,
)
def test_the_host_waits_for_numbers_of_rows_once_a_stage_and_with_a_capacity_never(
    ranks: RankPool, case: Case, expected: list[str]
) -> None:
    for forward, backward in ranks.run(case.world_size, waits, case):
        assert forward == expected and backward == []
