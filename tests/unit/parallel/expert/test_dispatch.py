"""Rows reach the ranks of their experts and return summed, for any choice of the routers.

A rank sends at least one row to each rank.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from frontier_llm.comm import build_mesh, serial_mesh, start_all_to_all_rows
from frontier_llm.config import CommConfig, OpsConfig
from frontier_llm.ops import select_ops
from frontier_llm.parallel.expert import Choices, ToNodes, combine, dispatch, plan_dispatch
from frontier_llm.parallel.expert.plan import _RowCounts, _stream_aside
from frontier_llm.topology.grid import Grid
from tests.harness.pool import RankPool

EXPERTS = 4
WIDTH = 3
OPS = select_ops(OpsConfig(), "cpu", torch.float64)


def chosen(kind: str, rank: int, tokens: int) -> torch.Tensor:
    """Return the experts (N, 2) of a rank's tokens."""
    if kind == "one":  # all ranks send all rows to expert 1 or 0, so that the last ranks receive none
        return torch.tensor([[1, 0]]).repeat(tokens, 1)
    generator = torch.Generator().manual_seed(rank)
    return (
        torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(tokens)])
        if tokens
        else torch.empty(0, 2).long()
    )


def there_and_back(
    rank: int, size: int, etp: int, kind: str, transport: str
) -> tuple[list[int], list[int], bool, bool]:
    """Return the rows sent, the rows per expert, whether each expert received its own rows, and whether the sums are
    correct.
    """
    grid = Grid(1, 1, size, ep=size // etp, etp=etp)
    axis = build_mesh(grid, rank, timeout_s=30.0, comm=CommConfig(transport=transport), experts=True).ep  # type: ignore[arg-type]
    tokens = 5 * rank  # rank 0 has no tokens
    experts_Nk = chosen(kind, rank, tokens)
    x_NH = torch.arange(tokens * WIDTH, dtype=torch.float64).view(tokens, WIDTH) + 100 * rank
    x_NH.requires_grad_()
    weights_Nk = (experts_Nk + 1).double().requires_grad_()
    plan = plan_dispatch(Choices(experts_Nk, EXPERTS), axis, OPS, etp)
    x_MH, weights_M = dispatch(x_NH, weights_Nk, plan)
    local = EXPERTS * etp // size
    rows = plan.ends_E.diff(prepend=plan.ends_E.new_zeros(1))
    number_M = torch.arange(local).repeat_interleave(rows) + rank // etp * local
    own = torch.equal(weights_M.detach(), (number_M + 1).double())  # the weight of a row identifies its expert
    y_NH = combine(x_MH * weights_M[:, None] / etp, plan)
    expected = x_NH * weights_Nk.sum(-1, keepdim=True)
    right = torch.allclose(y_NH, expected)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    ours = torch.autograd.grad(y_NH, (x_NH, weights_Nk), upstream)
    theirs = torch.autograd.grad(expected, (x_NH, weights_Nk), upstream)
    return plan.sent, rows.tolist(), own, right and all(map(torch.allclose, ours, theirs))


@pytest.mark.parametrize("transport", ["shm", "torch"])
@pytest.mark.parametrize("kind", ["one", "any"])
@pytest.mark.parametrize(("size", "etp"), [(4, 1), (2, 2), (4, 2)])
def test_every_row_reaches_its_expert_and_comes_back(
    ranks: RankPool, size: int, etp: int, kind: str, transport: str
) -> None:
    for sent, rows, own, right in ranks.run(size, there_and_back, size, etp, kind, transport):
        assert own and right and min(sent) >= 1
        assert kind == "any" or sum(rows) in (
            0,
            sum(5 * rank for rank in range(size)),
            2 * sum(5 * rank for rank in range(size)),
        )


def by_nodes(rank: int, per_node: int, etp: int, kind: str, drops: bool) -> tuple[int, bool, bool]:
    """Return the fewest rows that a stage sent, whether each token went once to each node, and whether the results are
    correct.

    Correct sums and gradients equal an all-to-all of one stage.
    """
    grid = Grid(1, 1, 4, ep=4 // etp, etp=etp)
    mesh = build_mesh(grid, rank, ranks_per_node=per_node, timeout_s=30.0, experts=True, by_node=True)
    axis = mesh.ep
    assert axis.levels is not None and axis.nodes == 4 // per_node
    node, rail = axis.levels
    # only axes of experts interleave two microbatches
    assert mesh.world.interleaving is None and mesh.dp.interleaving is None
    assert axis.interleaving is not None and rail.interleaving is axis.interleaving
    experts_Nk = chosen(kind, rank, 5 * rank)  # rank 0 has no tokens
    x_NH = torch.randn(len(experts_Nk), WIDTH, dtype=torch.float64, requires_grad=True)
    weights_Nk = torch.rand(experts_Nk.shape, dtype=torch.float64, requires_grad=True)
    dropped_Nk = torch.arange(experts_Nk.numel()).view_as(experts_Nk) % 3 == 0 if drops else None
    to_nodes = ToNodes(x_NH, weights_Nk, Choices(experts_Nk, EXPERTS, dropped_Nk), rail, OPS)
    x_MH, weights_Mk, on_node = to_nodes.arrive()
    plan = plan_dispatch(on_node, node, OPS, etp)
    rows_MH, weights_M = dispatch(x_MH, weights_Mk, plan)
    y_NH = combine(combine(rows_MH * weights_M[:, None] / etp, plan), to_nodes.plan)
    expected = x_NH * (weights_Nk if dropped_Nk is None else weights_Nk * ~dropped_Nk).sum(-1, keepdim=True)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    ours = torch.autograd.grad(y_NH, (x_NH, weights_Nk), upstream)
    theirs = torch.autograd.grad(expected, (x_NH, weights_Nk), upstream)
    kept_Nk = torch.ones_like(experts_Nk, dtype=torch.bool) if dropped_Nk is None else ~dropped_Nk
    pairs = {
        (t, int(expert) // (EXPERTS // rail.size))
        for t, row in enumerate(experts_Nk)
        for expert, kept in zip(row, kept_Nk[t], strict=True)
        if kept
    }
    empty = rail.size - len({number for _, number in pairs})
    once = sum(to_nodes.plan.sent) == len(pairs) + empty  # each node that receives no token gets one padding row
    return (
        min(*to_nodes.plan.sent, *plan.sent),
        once,
        torch.allclose(y_NH, expected) and all(map(torch.allclose, ours, theirs)),
    )


@pytest.mark.parametrize(("per_node", "etp"), [(2, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize(("kind", "drops"), [("one", False), ("any", False), ("any", True)])
def test_a_token_goes_once_to_each_node_and_no_stage_sends_nothing(
    ranks: RankPool, per_node: int, etp: int, kind: str, drops: bool
) -> None:
    for fewest, once, right in ranks.run(4, by_nodes, per_node, etp, kind, drops):
        # with one rank per node the stage inside a node sends no rows
        assert fewest >= (1 if per_node > 1 else 0) and once and right


def without_a_row(rank: int) -> str:
    axis = build_mesh(Grid(1, 1, 2), rank, timeout_s=30.0).dp
    try:
        start_all_to_all_rows(torch.ones(2, 1), [2, 0] if rank else [1, 1], [2, 0], axis)
    except AssertionError as error:
        return str(error)
    return ""


def test_an_all_to_all_with_nothing_for_a_rank_is_never_begun(ranks: RankPool) -> None:
    assert all("hangs" in message for message in ranks.run(2, without_a_row))


def test_numbers_of_rows_of_all_layers_use_one_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """More streams than hardware queues would share queues, and could then hang."""
    made: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or object())
    _stream_aside.cache_clear()
    axis = serial_mesh().ep
    with FakeTensorMode():
        rows_RE = torch.empty(1, EXPERTS, dtype=torch.int64, device="cuda")
        streams = {_RowCounts(rows_RE, axis, to_host=True)._aside for _ in range(6)}
    _stream_aside.cache_clear()
    assert len(streams) == len(made) == 1 and None not in streams
