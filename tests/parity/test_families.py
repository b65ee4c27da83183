"""Further families and losses, which are not tested on every layout.

A few layouts compute the same as one rank, and one rank computes the same as the oracle. All comparisons are in
float64.
"""

from __future__ import annotations

import pytest

from tests.harness.families import FURTHER_FAMILIES
from tests.harness.marks import but_first, exhaustive, thorough
from tests.harness.pool import RankPool
from tests.parity.cases import Case
from tests.parity.compare import Run, differences, gather
from tests.parity.three_steps import train_case
from tests.parity.witness import witness

_SERIAL: dict[Case, Run] = {}


def run(ranks: RankPool, case: Case) -> Run:
    """Run a case. Serial runs are kept and not repeated."""
    if case not in _SERIAL:
        results = gather(ranks.run(case.world_size, train_case, case))
        if case != case.serial():
            return results
        _SERIAL[case] = results
    return _SERIAL[case]


@pytest.mark.thorough
@pytest.mark.parametrize("family", but_first(sorted(FURTHER_FAMILIES), in_ci=1))
def test_the_serial_run_equals_the_oracle(ranks: RankPool, family: str) -> None:
    case = Case(family, documents=True)
    serial = run(ranks, case)
    assert differences(serial, witness(case, serial.initial)) == []


Z = "train.loss_weights={output-z: 0.1}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", tp=2, pp=2, documents=True, settings=(Z,)),
        exhaustive(Case("gemma2", tp=2, dp=2, cp=2, sequence_parallel=True, micro_batch=2, settings=(Z,))),
    ],
    ids=str,
)
def test_the_squared_log_sum_exp_of_the_logits_is_a_loss(ranks: RankPool, case: Case) -> None:
    """The sum is over a vocabulary that tp splits, and over the targets that count."""
    alone = Case(case.family, documents=case.documents, settings=(Z,))
    serial = run(ranks, alone)
    assert differences(serial, witness(alone, serial.initial)) == []
    assert differences(run(ranks, case), serial) == []


LAYOUTS = [
    exhaustive(Case("olmo2", tp=2, pp=2)),
    Case("gemma2", tp=2, pp=2, sequence_parallel=True, recompute="full,none,selective"),
    thorough(Case("gemma2", tp=2, cp=2, pp=2, schedule="zb-h1", documents=True)),
    exhaustive(Case("gemma2", cp=2, dp=2, recompute="selective", settings=("parallel.context_attention=ring",))),
    exhaustive(Case("gemma2", tp=4, pp=2, schedule="interleaved", recompute="full")),
    thorough(Case("olmo2", tp=4, dp=2, sequence_parallel=True, documents=True, recompute="full")),
    exhaustive(Case("olmo2", tp=2, cp=2, pp=2, sequence_parallel=True, schedule="zb-h1")),
]


@pytest.mark.thorough
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_layout_computes_what_one_rank_computes(ranks: RankPool, case: Case) -> None:
    """Compares loss, gradients, norm, initial weights and parameters after three steps.

    Replicas must be bitwise equal. The number of collective calls and their bytes must equal the planner's formulas.
    """
    assert differences(run(ranks, case), run(ranks, case.serial())) == []
