"""Adafactor on several layouts against a serial run in float64 that is written from the formula.

The tests also resume on another layout and compare the copies of the factored second moment.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.optimizers import MASTER, state_bytes
from frontier_llm.checkpoint.weights import CheckpointWeights
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.costs.memory import memory_by_rank
from frontier_llm.topology.plan import split_layers
from tests.harness.marks import but_first
from tests.harness.pool import RankPool
from tests.oracle.optimizers import adafactor
from tests.parity.cases import Case
from tests.parity.compare import differences, gather
from tests.parity.test_own_optimizer import resume, save_and_go_on
from tests.parity.three_steps import build, train_case
from tests.parity.witness import witness

FRONTIER = rates(load_machine("frontier"))
ADAFACTOR = ("optimizer.name=adafactor",)

CASES = [
    Case("llama", settings=ADAFACTOR),
    Case("llama", tp=2, dp=2, sequence_parallel=True, bucket_elements=3000, settings=ADAFACTOR),
    Case("gpt", tp=2, pp=2, dp=2, schedule="zb-h1", overlap_weights=True, settings=ADAFACTOR),
    Case("mpt", pp=2, dp=2, zero=0, settings=ADAFACTOR),
    Case("llama", tp=4, cp=2, settings=ADAFACTOR),
]


@pytest.mark.thorough
@pytest.mark.parametrize("case", but_first(CASES, 2), ids=str)
def test_it_trains_as_the_serial_formula(ranks: RankPool, case: Case) -> None:
    """The test also compares the calls and bytes over dp and tp with the closed form."""
    run = gather(ranks.run(case.world_size, train_case, case))
    optimizer = case.config().optimizer
    assert differences(run, witness(case, run.initial, adafactor(optimizer.betas, optimizer.eps))) == []


@pytest.mark.thorough
def test_each_expert_is_a_matrix_wherever_it_lies(ranks: RankPool) -> None:
    """Experts are sharded over ranks that also split their width. The result must equal one rank with all experts."""
    settings = (*ADAFACTOR, "parallel.expert=2", "parallel.expert_tensor=2")
    case = Case("mixtral", tp=2, dp=4, settings=settings)
    alone, shared = (gather(ranks.run(one.world_size, train_case, one)) for one in (case.serial(), case))
    assert differences(shared, alone) == []


def held(rank: int, case: Case) -> tuple[int, int]:
    """Return the pipeline rank and the bytes of the optimizer state without the master weights."""
    state = build(rank, case)
    tensors = (values for part in state.optimizer.state() for kind, values in part.tensors.items() if kind != MASTER)
    return state.mesh.pp.rank, sum(values.nbytes for values in tensors)


def test_a_plan_counts_what_a_rank_holds(ranks: RankPool) -> None:
    case = Case("llama", tp=2, pp=2, zero=0, settings=ADAFACTOR)
    layout = Layout(tp=2, pp=2, microbatches=8, dtype="fp64", optimizer="adafactor", sharding="none")
    planned = memory_by_rank(case.config().model, layout, FRONTIER, split_layers(case.config().model, 2))
    for stage, nbytes in ranks.run(case.world_size, held, case):
        assert nbytes == planned[stage]["optimizer"]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", but_first([{"tp": 2, "pp": 2}, {"dp": 4, "zero": 0}]), ids=str)
def test_it_resumes_on_another_layout(ranks: RankPool, layout: dict[str, Any], tmp_path: Path) -> None:
    """The replica check of `resume` also compares the copies of the row and column means on the ranks of dp and tp."""
    losses = ranks.run(8, save_and_go_on, Case("llama", tp=2, dp=4, settings=ADAFACTOR), tmp_path)[0]
    manifest = CheckpointWeights(tmp_path / "checkpoints" / "step_00000002").manifest
    elements = sum(prod(tensor.shape) * len(manifest.kinds_of(tensor)) for tensor in manifest.tensors)
    assert elements * 8 == state_bytes(Case("llama").config().model, "adafactor", "fp64")
    for loss, updates, largest in ranks.run(4, resume, Case("llama", **layout, settings=ADAFACTOR), tmp_path):
        assert loss == pytest.approx(losses[2], rel=1e-12)
        assert updates == 2 and largest > 0
