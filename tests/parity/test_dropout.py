"""Dropout masks depend only on counters.

The dropped elements of a token are the same on every rank, in every order of computation and in a recomputation. They
are also the oracle's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.marks import exhaustive, thorough
from tests.harness.pool import RankPool
from tests.parity.cases import Case
from tests.parity.compare import differences
from tests.parity.test_layouts import RunCase, run_case
from tests.parity.test_own_optimizer import resume, save_and_go_on
from tests.parity.witness import witness

__all__ = ["run_case"]

DROPS = ("model.dropout=0.25", "model.sequence_length=16")


@pytest.mark.parametrize("family", ["gpt", exhaustive("neox"), exhaustive("mixtral")])
def test_the_serial_run_equals_the_oracle(run_case: RunCase, family: str) -> None:
    """The comparison includes the evaluation after the steps, in which no element is dropped."""
    case = Case(family, settings=DROPS)
    serial = run_case(case)
    assert differences(serial, witness(case, serial.initial)) == []
    assert differences(serial, run_case(Case(family, settings=DROPS[1:]))) != []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        thorough(Case("gpt", tp=2, pp=2, dp=2, sequence_parallel=True, recompute="full", micro_batch=2)),
        exhaustive(Case("gpt", tp=2, cp=2, dp=2, recompute="selective", schedule="1f1b")),
        Case("gpt", cp=2, pp=4, sequence_parallel=False, schedule="zb-h1", documents=True),
        thorough(Case("neox", tp=2, cp=2, pp=2, sequence_parallel=True, schedule="interleaved", order="tp-pp-dp")),
        exhaustive(Case("mixtral", tp=2, dp=2, sequence_parallel=True, settings=("parallel.expert=2",))),
    ],
    ids=str,
)
def test_every_layout_drops_the_same(run_case: RunCase, case: Case) -> None:
    case = Case(**{**vars(case), "settings": (*DROPS, *case.settings)})
    assert differences(run_case(case), run_case(case.serial())) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        ("masks-by-own-index", Case("gpt", tp=2, sequence_parallel=True, settings=DROPS)),
        thorough("masks-by-own-index", Case("gpt", cp=2, settings=DROPS)),
        thorough("masks-by-own-row", Case("gpt", dp=2, settings=DROPS)),
    ],
    ids=str,
)
def test_masks_by_where_a_token_lies_turn_the_comparison_red(run_case: RunCase, mistake: str, case: Case) -> None:
    found = differences(run_case(case, mistake), run_case(case.serial()))
    assert any("losses" in line for line in found), found


@pytest.mark.thorough
def test_a_run_that_stops_and_resumes_drops_what_the_other_would_have(ranks: RankPool, tmp_path: Path) -> None:
    """The loss is bit-equal on the same layout. Other layouts sum in another order and differ by rounding."""
    case = Case("gpt", tp=2, dp=2, recompute="selective", settings=DROPS)
    third = ranks.run(4, save_and_go_on, case, tmp_path)[0][2]
    assert {answer[0] for answer in ranks.run(4, resume, case, tmp_path)} == {third}
    for layout in (
        Case("gpt", pp=2, dp=2, micro_batch=2, settings=DROPS),
        Case("gpt", tp=2, cp=2, sequence_parallel=True, settings=DROPS),
    ):
        for loss, updates, _ in ranks.run(4, resume, layout, tmp_path):
            assert loss == pytest.approx(third, rel=1e-12) and updates == 2
    kept_all = Case("gpt", tp=2, dp=2, recompute="selective", settings=DROPS[1:])
    assert ranks.run(4, resume, kept_all, tmp_path, "model.dropout")[0][0] != pytest.approx(third, rel=1e-6)
