"""Runs a parity comparison with a planted fault on every rank, and returns whether the comparison finds the fault."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tests.harness.planted import planted
from tests.harness.pool import RankError, RankPool
from tests.parity.cases import Case, pairwise
from tests.parity.compare import Run, differences, gather
from tests.parity.test_adafactor import CASES as ADAFACTOR
from tests.parity.test_experts import LAYOUTS as EXPERTS
from tests.parity.test_families import LAYOUTS as FAMILIES
from tests.parity.test_families import Z
from tests.parity.test_muon import CASES as MUON
from tests.parity.three_steps import RankResult, train_case

LIMIT_S = 180.0  # limit for three steps: a fault may make ranks wait for each other
MOST_CASES = 2  # largest number of cases that are taken from `test_every_pair_of_settings`
_LONGER = ("model.sequence_length=16",)


@cache
def cases_of(layout: str) -> Sequence[Case]:
    """Return the cases of the parity tests that execute the lines of a key of `axis_faults.LAYOUTS`, smallest first."""
    pairs: dict[str, dict[str, Any]] = {
        "sp": {"family": "gpt", "tp": 2, "sequence_parallel": True},
        "llama": {"family": "llama", "tp": 2, "sequence_parallel": True, "tensor_chunks": 1},
        "dp": {"dp": 2, "tp": 1, "zero": 1, "overlap_gradients": True},
        "late": {"dp": 2, "tp": 1, "zero": 1, "overlap_gradients": False},
        "dp0": {"dp": 2, "tp": 1, "pp": 1, "zero": 0},
        "tied": {"family": "gpt", "pp": 2, "tp": 1},
    }
    if layout in pairs:
        return _pairs(**pairs[layout])
    output_z = Case("gpt", tp=2, pp=2, documents=True, settings=(Z,))
    others: dict[str, Sequence[Case]] = {
        "tp": [output_z],
        "zb": [Case("llama", tp=2, pp=2, sequence_parallel=True, schedule="zb-h1", transport="torch")],
        "wire": [],  # a narrow wire rounds gradients, so no parity test compares it with a run on one rank
        "gather": [_context("gather")],
        "ring": [_context("ring")],
        "heads": [_context("heads")],
        "docs": [
            _documents(family="mpt", zero=0, micro_batch=2, overlap_gradients=False, bucket_elements=3_000),
            _documents(family="llama", tp=2, sequence_parallel=True, recompute="selective", tensor_chunks=2),
        ],
        "olmo": [case for case in map(_case, FAMILIES) if case.family == "olmo2"],
        "head-norm": [case for case in EXPERTS if case.family == "deepseek" and case.tp > 1],
        "moe": EXPERTS[:1],
        "moe-cp": [case for case in EXPERTS if case.cp > 1],
        "etp": [case for case in EXPERTS if "parallel.expert_tensor=2" in case.settings],
        "moe-global": [Case("olmoe", dp=2, settings=("model.moe.balance=global", "model.moe.balance_weight=0.3"))],
        "z": [output_z],
        "muon": MUON[5:],
        "adafactor": ADAFACTOR[1:2],
    }
    return others[layout]


def _case(marked: Any) -> Case:
    """Return the case of a pytest parameter, which may have a mark."""
    return getattr(marked, "values", (marked,))[0]


def _pairs(**fields: Any) -> list[Case]:
    """Return the cases of `test_every_pair_of_settings` with these fields that have the fewest ranks."""
    cases = [case for case in pairwise() if all(getattr(case, name) == value for name, value in fields.items())]
    return sorted(cases, key=lambda case: case.world_size)[:MOST_CASES]


def _context(way: str) -> Case:
    """Return the case of `test_every_way_of_attention`."""
    settings = (*_LONGER, f"parallel.context_attention={way}")
    return Case("llama", cp=4, documents=True, recompute="selective", settings=settings)


def _documents(**fields: Any) -> Case:
    """Return a case of `test_with_every_other_axis`."""
    return Case(documents=True, settings=_LONGER, cp=2, dp=2, **fields)


Place = tuple[str, str, str, str]  # the arguments of `planted`


def train_planted(rank: int, case: Case, place: Place) -> RankResult:
    """Run three steps of a case on one rank with a planted fault."""
    with planted(*place):
        return train_case(rank, case)


class ParityTests:
    """Runs cases of the parity tests with planted faults."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._serial: dict[Case, Run] = {}

    def find(self, layout: str, place: Place) -> str:
        """Return the first difference of the first case that differs. '' if no case differs."""
        return next(filter(None, (self._difference(case, place) for case in cases_of(layout))), "")

    def _difference(self, case: Case, place: Place) -> str:
        """Compare a case with a run on one rank without the fault, which equals the oracle. Differences of numbers come
        before differences of calls.
        """
        serial = case.serial()
        if serial not in self._serial:
            self._serial[serial] = gather(self._pool.run(1, train_case, serial))
        try:
            run = gather(self._pool.run(case.world_size, train_planted, case, place, timeout_s=LIMIT_S))
        except RankError as error:
            return "the ranks wait for each other" if "no answer after" in str(error) else "a rank fails"
        except AssertionError as error:
            return str(error).splitlines()[0]
        found = differences(run, self._serial[serial])
        return _without_numbers(min(found, key=lambda line: line.startswith("rank "), default=""))


def _without_numbers(difference: str) -> str:
    """Return the name of the value that differs: 'losses', 'replicas of gradients of NAME', 'calls of AXIS NAME'."""
    name = difference.removeprefix("rank 0: ").split(":")[0]
    return f"replicas of {name}" if "replicas differ" in difference else name
