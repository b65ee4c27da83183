"""Figures in sentences of the pages are those that the programs compute now."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness import DOCS
from benchmarks.planner import primus_league, reduction_in_flight
from benchmarks.planner.scaling_tables import efficiencies, plans_of
from benchmarks.published.datasets import is_fitted, shipped
from benchmarks.published.predict import predict
from benchmarks.published.validate import score
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.published import PUBLISHED

ROWS = shipped()


def text_of(name: str) -> str:
    """Return the text of a page with single spaces, so that a sentence may continue on the next line."""
    text = (DOCS / name).read_text(encoding="utf-8")
    words = text.split()
    return " ".join(words)


def test_errors_of_rows_that_no_fit_has_used() -> None:
    vtrain = [row for row in ROWS if row.dataset.startswith("vTrain")]
    others = len(ROWS) - len(vtrain)
    assert f"{len(vtrain)} measurements of vTrain and {others} of published tables" in text_of("planner.md")
    assert f"{len(vtrain)} vTrain rows (MIT licence) and {others} rows" in text_of("benchmarks/planner.md")
    errors = []
    for dataset in ("vTrain multi-node", "vTrain single-node", "MI250X"):
        rows = [row for row in ROWS if row.dataset == dataset]
        unseen = [row for row in rows if not is_fitted(row)]
        result = score(dataset, "unseen", predict(unseen))
        errors.append(f"{result.mape:.1f} %")
    multi, single, mi250x = errors
    words = f"{multi} on vTrain's multi-node set, {single} on its single-node set, and {mi250x} on MI250X"
    assert words in text_of("planner.md")


@pytest.mark.parametrize("page", ["scaling.md", "benchmarks/scaling.md"])
def test_differences_from_the_strong_series_of_ornl(page: str) -> None:
    numbers = rates(load_machine("frontier"))
    points = []
    for model in ("gpt-175b", "gpt-1t"):
        series = [point for point in PUBLISHED if point.mode == "strong"]
        (published,) = [point for point in series if point.model == model]
        plans = plans_of(model, numbers)
        predicted = efficiencies(plans)[-1]
        difference = predicted - published.efficiency
        points.append(f"{100 * difference:.1f}")
    words = f"measured {' and '.join(points)} percentage points less efficiency than predicted"
    assert words in text_of(page)


def test_a_speed_variation_does_not_improve_the_rows_of_frontier() -> None:
    rows = [row for row in ROWS if row.machine == "frontier"]
    variation = rates(load_machine("mi250")).speed_variation
    varied = []
    for row in rows:
        software = {**row.software, "speed_variation": variation}
        varied.append(replace(row, software=software))
    without = score("frontier", "all", predict(rows)).mape
    varying = score("frontier", "all", predict(varied)).mape
    words = f"{len(rows)} published rows of Frontier the planner's error is {without:.1f} %, and {varying:.1f} % with"
    assert words in text_of("benchmarks/scaling.md")


def test_the_league_of_schedules() -> None:
    table = primus_league.table(primus_league.MICROBATCHES)
    assert "\n".join(table) in primus_league.PAGE.read_text(encoding="utf-8")


def test_the_sums_of_gradients_with_one_communication_in_flight() -> None:
    table = reduction_in_flight.table(reduction_in_flight.CASES)
    assert "\n".join(table) in reduction_in_flight.PAGE.read_text(encoding="utf-8")
