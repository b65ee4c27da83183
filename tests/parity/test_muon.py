"""Muon on several layouts against a serial run in float64 that is written from the paper's formula.

The tests also resume on another layout and measure the error of bf16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontier_llm.training.step import train_step
from tests.harness.marks import but_first
from tests.harness.pool import RankPool
from tests.oracle.optimizers import is_matrix, muon
from tests.parity.cases import Case
from tests.parity.compare import Run, Tensors, differences, gather
from tests.parity.test_own_optimizer import resume, save_and_go_on
from tests.parity.three_steps import build, train_case
from tests.parity.witness import witness

MUON = ("optimizer.name=muon",)
GROUPS = (*MUON, "optimizer.heads=groups")
# With two layers, complete matrices would leave large parts of the slices of eight owners empty. Muon therefore splits
# the eight matrices and gathers them.
FEW = (*MUON, "model.layers=2")
FEWER = (*MUON, "model.layers=1")  # with half the number of matrices, four owners show the same effect


def serial_muon(case: Case, initial: Tensors) -> Run:
    """Return the oracle's run: Muon for matrices, AdamW for all other parameters."""
    optimizer = case.config().optimizer
    return witness(case, initial, muon(optimizer.betas, optimizer.eps, optimizer.heads == "groups"))


CASES = [
    Case("llama", settings=MUON),
    Case("llama", tp=2, dp=2, sequence_parallel=True, settings=GROUPS),
    Case("llama", tp=4, dp=2, bucket_elements=3000, settings=MUON),
    Case("gpt", tp=2, pp=2, dp=2, schedule="zb-h1", overlap_weights=True, settings=MUON),
    Case("mpt", pp=2, dp=2, zero=0, settings=MUON),
    Case("llama", tp=2, dp=4, settings=FEWER),
]


@pytest.mark.thorough
@pytest.mark.parametrize("case", but_first(CASES[1:] + CASES[:1], 2), ids=str)
def test_it_trains_as_the_serial_formula(ranks: RankPool, case: Case) -> None:
    """The test also compares the calls and bytes over dp and tp with the closed form."""
    run = gather(ranks.run(case.world_size, train_case, case))
    assert differences(run, serial_muon(case, run.initial)) == []


def cut(rank: int, case: Case) -> tuple[int, int]:
    """Return the number of buckets for Muon's matrices, and the number of those in which a matrix lies in the slices of
    several owners.
    """
    buckets = [bucket for bucket in build(rank, case).optimizer.buckets if bucket.whole]
    return len(buckets), sum(not bucket.apart for bucket in buckets)


def test_matrices_are_cut_where_whole_ones_would_be_padding(ranks: RankPool) -> None:
    assert ranks.run(4, cut, Case("llama", dp=4, settings=MUON))[0] == (1, 0)
    assert ranks.run(4, cut, Case("llama", dp=4, settings=FEWER))[0] == (1, 1)


@pytest.mark.parametrize("layout", but_first([{"pp": 2, "dp": 2}, {"tp": 4}]), ids=str)
def test_it_resumes_on_another_layout(ranks: RankPool, layout: dict[str, Any], tmp_path: Path) -> None:
    losses = ranks.run(8, save_and_go_on, Case("llama", dp=8, settings=FEW), tmp_path)[0]
    for loss, updates, largest in ranks.run(4, resume, Case("llama", **layout, settings=FEW), tmp_path):
        assert loss == pytest.approx(losses[2], rel=1e-12)
        assert updates == 2 and largest > 0


def after_three_steps(rank: int, case: Case, dtype: str) -> dict[str, np.ndarray]:
    state = build(rank, case, dtype)
    for _ in range(3):
        train_step(state)
    return {part.name: part.tensors["master"].double().numpy() for part in state.optimizer.state()}


@pytest.mark.thorough
def test_bf16_turns_the_update_by_little(ranks: RankPool) -> None:
    """Newton-Schulz amplifies small components of a matrix, including rounding errors.

    After three steps the bf16 update differs from float64 by some percent.
    """
    case = Case("llama", settings=MUON)
    exact, rounded = (ranks.run(1, after_three_steps, case, dtype)[0] for dtype in ("fp64", "bf16"))
    initial = {part.name: part.values for part in ranks.run(1, train_case, case)[0].initial}
    for name in exact:
        if is_matrix(name):
            way = exact[name] - initial[name].reshape(exact[name].shape)
            miss = np.linalg.norm(rounded[name] - exact[name]) / np.linalg.norm(way)
            assert 1e-4 < miss < 0.25, (name, miss)
