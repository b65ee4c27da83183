"""Lion on several layouts against a serial run in float64 written from the paper's formula."""

from __future__ import annotations

import pytest

from tests.harness.pool import RankPool
from tests.oracle.optimizers import lion
from tests.parity.cases import Case
from tests.parity.compare import differences, gather
from tests.parity.three_steps import train_case
from tests.parity.witness import witness

LION = ("optimizer.name=lion",)


# The family has no biases. A key's bias has only rounding as its gradient, and the sign of rounding is random.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", [Case("mpt", tp=2, dp=2, settings=LION), Case("mpt", pp=2, dp=2, schedule="v-half", settings=LION)], ids=str
)
def test_it_trains_as_the_serial_formula(ranks: RankPool, case: Case) -> None:
    run = gather(ranks.run(case.world_size, train_case, case))
    assert differences(run, witness(case, run.initial, lion(case.config().optimizer.betas))) == []
