"""Wrong arithmetic is detected and classified as transient or persistent, and the rank is named.

Correct results cause no report, and an op with nondeterministic results is noticed.
"""

from __future__ import annotations

import pytest
import torch

from frontier_llm.comm import build_mesh, serial_mesh
from frontier_llm.topology.grid import Grid
from frontier_llm.training.guard.recompute import Recompute, UntrustedRank, WrongArithmetic
from tests.harness.pool import RankPool


def examine(rank: int, world_size: int, wrong: dict[int, tuple[float, float]]) -> list[UntrustedRank] | str:
    """Return the findings of the check, or the message of its error.

    `wrong[rank]` holds the values that are added to the first and the second result of that rank.
    """
    mesh = build_mesh(Grid(1, 1, world_size), rank)
    additions = iter(wrong.get(rank, (0.0, 0.0)))

    def compute() -> dict[str, torch.Tensor]:
        gradients = torch.full((8,), 1.5)
        gradients[3] += next(additions)
        return {"embedding.weight": torch.ones(4), "head.weight": gradients}

    try:
        return Recompute(compute, mesh).check(7)
    except WrongArithmetic as error:
        return str(error)


def test_clean_replicas_are_silent(ranks: RankPool) -> None:
    assert ranks.run(3, examine, 3, {}) == [[], [], []]


def test_an_error_that_does_not_come_back_is_transient(ranks: RankPool) -> None:
    answers = ranks.run(3, examine, 3, {1: (1e-6, 0.0)})
    assert [[(finding.rank, finding.kind) for finding in found] for found in answers] == [[(1, "transient")]] * 3


def test_an_error_that_stays_is_persistent_and_ends_the_run_on_all_ranks(ranks: RankPool) -> None:
    answers = ranks.run(3, examine, 3, {2: (1e-6, 1e-6)})
    assert len(set(answers)) == 1 and "persistent error on rank 2 on " in answers[0] and "rank 1" not in answers[0]
    assert "gradient of head.weight" in answers[0]


def test_two_replicas_that_disagree_are_both_suspects(ranks: RankPool) -> None:
    answers = ranks.run(2, examine, 2, {0: (1e-6, 1e-6)})
    assert "error on rank 0" in answers[0] and "error on rank 1" in answers[0]


def test_a_transient_error_does_not_blame_the_others(ranks: RankPool) -> None:
    answers = ranks.run(2, examine, 2, {0: (1e-6, 0.0)})
    assert [[(finding.rank, finding.kind) for finding in found] for found in answers] == [[(0, "transient")]] * 2


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_an_op_that_is_not_deterministic_is_noticed(noise: float) -> None:

    def compute() -> dict[str, torch.Tensor]:
        return {"weight": torch.linspace(0, 1, 64).sum(0, keepdim=True) + noise * torch.rand(1)}

    found = Recompute(compute, serial_mesh()).findings()
    assert [finding.kind for finding in found] == (["transient"] if noise else [])
