"""Tests sums whose messages carry 16-bit summands: the stated error bound, the same bits in every run and on every
rank, and half the bytes.
"""

from __future__ import annotations

import pytest
import torch

from frontier_llm.comm import build_mesh, start_narrow_sum_
from frontier_llm.config import CommConfig
from frontier_llm.topology.grid import Grid
from frontier_llm.training.step import train_step
from tests.harness.marks import but_first, thorough
from tests.harness.pool import RankPool
from tests.parity.cases import Case
from tests.parity.three_steps import Source

PART = 5_003
ROUNDING = 2.0**-8  # bf16's rounding to nearest; its significand has 8 bits


def _contribution(rank: int, size: int) -> torch.Tensor:
    """Return random numbers whose magnitudes cover eight decades, as those of gradients do."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(PART * size, generator=generator) * 10.0 ** (
        torch.rand(PART * size, generator=generator) * 8 - 8
    )


def _sums(rank: int, size: int, transport: str) -> tuple[torch.Tensor, torch.Tensor, dict]:
    axis = build_mesh(Grid(1, 1, size), rank, timeout_s=30.0, comm=CommConfig(transport=transport)).dp  # type: ignore[arg-type]
    x = _contribution(rank, size)
    scattered = x.clone()
    start_narrow_sum_(scattered, axis, torch.bfloat16, everywhere=False).wait()
    moved = dict(axis.ledger.bytes)
    everywhere = x.clone()
    pending = start_narrow_sum_(everywhere, axis, torch.bfloat16, everywhere=True)
    pending.wait()
    pending.wait()  # the second wait adds nothing
    return scattered.chunk(size)[rank], everywhere, moved


@pytest.mark.parametrize(("size", "transport"), [thorough(2, "auto"), (3, "torch"), thorough(4, "auto")])
def test_each_summand_is_rounded_once(ranks: RankPool, size: int, transport: str) -> None:
    replies, again = (ranks.run(size, _sums, size, transport) for _ in range(2))
    whole = torch.stack([_contribution(rank, size) for rank in range(size)]).double()
    magnitude = whole.abs().sum(0)
    for rank, (own, everywhere, moved) in enumerate(replies):
        others = magnitude - whole[rank].abs()
        mine = slice(rank * PART, (rank + 1) * PART)
        error = (own.double() - whole.sum(0)[mine]).abs()
        slack = 1e-6 * magnitude[mine]  # allows for rounding of the additions in fp32
        assert bool((error <= ROUNDING * others[mine] + slack).all())
        assert float(error.max()) > 0
        assert bool(((everywhere.double() - whole.sum(0)).abs() <= 2 * ROUNDING * magnitude).all())
        assert torch.equal(everywhere, replies[0][1]), "ranks have different bits"
        assert torch.equal(own, again[rank][0]) and torch.equal(everywhere, again[rank][1])
        assert moved == {("dp", "all_to_all"): 2 * PART * size}  # bytes; fp32 would send twice as many


def _losses(rank: int, case: Case, wire: str) -> list[tuple[float, float]]:
    from frontier_llm.topology.plan import make_plan
    from frontier_llm.training.build import build_state

    config = case.config("fp32")
    config = config.model_copy(update={"precision": config.precision.model_copy(update={"gradient_wire": wire})})
    plan = make_plan(config, case.world_size)
    mesh = build_mesh(plan.grid, rank, plan.placement, config.model.tied_embeddings, 60.0)
    state = build_state(config, plan, mesh, torch.device("cpu"), Source(case, mesh.dp.rank))
    return [(result.loss, result.gradient_norm) for result in (train_step(state) for _ in range(3))]


@pytest.mark.parametrize(
    "case", but_first([Case("mpt", dp=2, pp=2), Case("gpt", dp=4), Case("llama", dp=2, zero=0)]), ids=str
)
def test_training_stays_within_the_rounding_of_gradients(ranks: RankPool, case: Case) -> None:
    full, narrow = (ranks.run(case.world_size, _losses, case, wire) for wire in ("full", "bf16"))
    assert narrow[0] != full[0] and narrow[0][0][0] == full[0][0][0]  # the first loss is computed before any sum
    assert all(reply == narrow[0] for reply in narrow)
    # the first norm: rounding errors of 4e-3 average out
    assert narrow[0][0][1] == pytest.approx(full[0][0][1], rel=1e-3)
    # Adam's first steps have the size of the learning rate, whatever the gradient's size, so small differences are
    # amplified.
    assert [loss for loss, _ in narrow[0]] == pytest.approx([loss for loss, _ in full[0]], rel=5e-3)
    assert [norm for _, norm in narrow[0]] == pytest.approx([norm for _, norm in full[0]], rel=5e-2)
