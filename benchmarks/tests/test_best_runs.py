"""The uncertainty of a plan's figures holds on published runs that no constant was fitted on.

The best published rates equal the best rates of the shipped rows.
"""

from __future__ import annotations

import pytest

from benchmarks.published.best import as_json, best_of_rows
from benchmarks.published.datasets import FITTED, PublishedRun, shipped
from benchmarks.published.predict import cluster, predict
from benchmarks.published.validate import is_fitted
from frontier_llm.planner.uncertainty import BANDS, BEST_PUBLISHED, OTHER, SAME, basis, best_published

ROWS = shipped()


def basis_of(row: PublishedRun) -> str:
    """Return the basis that `plan` would print. A row that uses the file of a similar cluster has not run on that
    machine.
    """
    known = basis(cluster(row.machine), row.stack)
    return OTHER if known == SAME and not row.known else known


@pytest.mark.thorough
@pytest.mark.parametrize("wanted", [SAME, OTHER])
def test_nine_of_ten_unseen_runs_lie_inside_the_band(wanted: str) -> None:
    unseen = [row for row in ROWS if not (is_fitted(row) or row.unstated or row.approximate)]
    many = [row for row in unseen if row.dataset == "vTrain single-node"][::6]
    rows = [row for row in unseen if row.dataset != "vTrain single-node"] + many
    predictions = predict([row for row in rows if basis_of(row) == wanted])
    assert len(predictions) >= 25
    inside = [1 / (1 + BANDS[wanted]) <= 1 + one.error <= 1 + BANDS[wanted] for one in predictions]
    assert sum(inside) >= 0.9 * len(inside)


def test_the_best_published_rates_are_those_of_the_rows() -> None:
    assert best_published() == best_of_rows()
    assert BEST_PUBLISHED.read_text(encoding="utf-8") == as_json(best_of_rows())


def test_a_fitted_stack_is_known_on_its_machine() -> None:
    assert all(basis(cluster(machine), stack) == SAME for machine, stack in FITTED)
