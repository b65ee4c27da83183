"""Rows reach the ranks of their experts and come back summed, whatever the routers choose; no rank is ever left without a row."""

from __future__ import annotations

import pytest
import torch

from frontier_llm.comm import build_mesh, start_all_to_all_rows
from frontier_llm.config import CommConfig
from frontier_llm.expert_parallel import combine, dispatch, plan_dispatch
from frontier_llm.topology import Grid
from tests.harness.pool import RankPool

EXPERTS, WIDTH = 4, 3


def chosen(kind: str, rank: int, tokens: int) -> torch.Tensor:
    """(N, 2) experts of a rank's tokens."""
    if kind == "one":  # all that anybody has goes to expert 1, so that the last ranks get nothing
        return torch.tensor([[1, 0]]).repeat(tokens, 1)
    generator = torch.Generator().manual_seed(rank)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(tokens)]) if tokens else torch.empty(0, 2).long()


def there_and_back(rank: int, size: int, etp: int, kind: str, transport: str) -> tuple[list[int], list[int], bool, bool]:
    """(rows sent, rows that experts have, whether each saw its own rows, whether the sums are right)."""
    grid = Grid(1, 1, size, ep=size // etp, etp=etp)
    axis = build_mesh(grid, rank, timeout_s=30.0, comm=CommConfig(transport=transport), experts=True).ep  # type: ignore[arg-type]
    tokens = 5 * rank  # the first has none
    experts_Nk = chosen(kind, rank, tokens)
    x_NH = torch.arange(tokens * WIDTH, dtype=torch.float64).view(tokens, WIDTH) + 100 * rank
    x_NH.requires_grad_()
    weights_Nk = (experts_Nk + 1).double().requires_grad_()
    plan = plan_dispatch(experts_Nk, EXPERTS, axis, etp)
    x_MH, weights_M = dispatch(x_NH, weights_Nk, plan)
    local = EXPERTS * etp // size
    number_M = torch.arange(local).repeat_interleave(torch.tensor(plan.rows)) + rank // etp * local
    own = torch.equal(weights_M.detach(), (number_M + 1).double())  # a row's weight says for which expert it was
    y_NH = combine(x_MH * weights_M[:, None] / etp, plan)
    expected = x_NH * weights_Nk.sum(-1, keepdim=True)
    right = torch.allclose(y_NH, expected)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    ours = torch.autograd.grad(y_NH, (x_NH, weights_Nk), upstream)
    theirs = torch.autograd.grad(expected, (x_NH, weights_Nk), upstream)
    return plan.sent, plan.rows, own, right and all(map(torch.allclose, ours, theirs))


@pytest.mark.parametrize("transport", ["shm", "torch"])
@pytest.mark.parametrize("kind", ["one", "any"])
@pytest.mark.parametrize(("size", "etp"), [(4, 1), (2, 2), (4, 2)])
def test_every_row_reaches_its_expert_and_comes_back(ranks: RankPool, size: int, etp: int, kind: str, transport: str) -> None:
    for sent, rows, own, right in ranks.run(size, there_and_back, size, etp, kind, transport):
        assert own and right and min(sent) >= 1
        assert kind == "any" or sum(rows) in (0, sum(5 * rank for rank in range(size)), 2 * sum(5 * rank for rank in range(size)))


def without_a_row(rank: int) -> str:
    axis = build_mesh(Grid(1, 1, 2), rank, timeout_s=30.0).dp
    try:
        start_all_to_all_rows(torch.ones(2, 1), [2, 0] if rank else [1, 1], [2, 0], axis)
    except AssertionError as error:
        return str(error)
    return ""


def test_an_all_to_all_with_nothing_for_a_rank_is_never_begun(ranks: RankPool) -> None:
    assert all("hangs" in message for message in ranks.run(2, without_a_row))
