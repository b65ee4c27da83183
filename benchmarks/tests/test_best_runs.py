"""The uncertainty of a plan's figures holds on published runs that no constant was fitted on.

The best published rates equal the best rates of the shipped rows.
"""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.published.best import as_json, best_of_rows
from benchmarks.published.datasets import FITTED, PublishedRun, shipped
from benchmarks.published.predict import cluster, cluster_rates, complete, predict, rates_of
from benchmarks.published.validate import is_fitted
from frontier_llm.planner.breakdown import breakdown
from frontier_llm.planner.search import simulate_layout
from frontier_llm.planner.uncertainty import (
    BANDS,
    BEST_PUBLISHED,
    ESTIMATED,
    PUBLISHED,
    SAME,
    basis,
    best_published,
)

ROWS = shipped()


def basis_of(row: PublishedRun) -> str:
    """Return the basis that `plan` would print, but at least PUBLISHED, because a row is a published step.

    A row that uses the file of a similar cluster has not run on that machine.
    """
    known = row.known and basis_of_stack(row.machine, row.stack) == SAME
    return SAME if known else PUBLISHED


@cache
def basis_of_stack(machine: str, stack: str) -> str:
    """Return the basis of the row of a stack with the longest step."""
    rows = [row for row in ROWS if (row.machine, row.stack) == (machine, stack) and row.layout.cp == 1]
    row = max(rows, key=lambda row: row.seconds)
    numbers = rates_of(row, cluster_rates(machine, stack))
    plan = simulate_layout(row.model, complete(row, numbers), numbers)
    return basis(cluster(machine), stack, breakdown(plan, numbers))


@pytest.mark.thorough
@pytest.mark.parametrize("wanted", [SAME, PUBLISHED])
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
    assert best_published("equivalent") == best_of_rows(equivalent=True)
    assert BEST_PUBLISHED.read_text(encoding="utf-8") == as_json()


def test_a_fitted_stack_is_never_called_estimated() -> None:
    known = {pair: basis_of_stack(*pair) for pair in FITTED}
    assert ESTIMATED not in known.values()
    assert known["vtrain-a100", "megatron-lm"] == SAME
    assert known["frontier", "gpt-neox"] == PUBLISHED, "two fitted constants are not behind 80 % of the step"
