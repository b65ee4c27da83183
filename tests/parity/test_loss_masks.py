"""Tokens that are read but not trained on: on all layouts the loss divides by the number of trained tokens, as the
oracle does.
"""

from __future__ import annotations

import pytest

from tests.harness.marks import thorough
from tests.parity.cases import Case
from tests.parity.compare import differences
from tests.parity.test_layouts import RunCase, run_case  # noqa: F401  the fixture
from tests.parity.witness import witness

LONGER = ("model.sequence_length=16",)


@pytest.mark.parametrize("documents", [False, thorough(True)])
def test_a_masked_serial_run_equals_the_oracle(run_case: RunCase, documents: bool) -> None:  # noqa: F811
    case = Case("llama", documents=documents, read_only=True)
    serial = run_case(case)
    assert differences(serial, witness(case, serial.initial)) == []
    assert differences(serial, run_case(Case("llama", documents=documents))) != []


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", tp=2, pp=2, dp=2, sequence_parallel=True, micro_batch=2, read_only=True),
        thorough(Case("llama", cp=2, dp=2, documents=True, read_only=True, settings=LONGER)),
        thorough(Case("mpt", pp=4, schedule="zb-h1", recompute="full", read_only=True)),
    ],
    ids=str,
)
def test_every_layout_counts_the_same_targets(run_case: RunCase, case: Case) -> None:  # noqa: F811
    assert differences(run_case(case), run_case(case.serial())) == []


def test_dividing_by_a_rank_s_own_targets_turns_the_comparison_red(run_case: RunCase) -> None:  # noqa: F811
    case = Case("llama", cp=2, read_only=True, settings=LONGER)
    found = differences(run_case(case, "local-division"), run_case(case.serial()))
    assert any("losses" in line for line in found), found
