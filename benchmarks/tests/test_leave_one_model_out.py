"""The constants of NeMo's stacks, and their errors on models that the fit has not seen."""

from __future__ import annotations

import pytest

from benchmarks.planner.leave_one_model_out import PAGE, Errors, fit, mean_error, smallest_runs, table
from benchmarks.published.predict import cluster_rates


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Return the lines of the table, which are computed once."""
    return list(table(smallest_runs()))


@pytest.mark.thorough
def test_the_page_and_the_machine_file_have_the_fitted_constants(lines: list[str]) -> None:
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")
    gemm, speedup = (float(cell) for cell in lines[-1].split("|")[2:4])
    numbers = cluster_rates("eos", "nemo-24.09-fp8")
    assert (numbers.gemm_efficiency, numbers.linear_speedup) == (gemm, speedup)
    assert cluster_rates("eos", "nemo-24.09").linear_speedup == 1.0


def test_the_fit_finds_the_best_constants_of_its_grid() -> None:
    runs = [run for run in smallest_runs() if run.model.name == "Nemotron4-340B"][:2]
    errors = Errors()
    best = mean_error(runs, errors, fit(runs, errors))
    assert best < 0.03
    assert best <= min(mean_error(runs, errors, constants) for constants in ((0.595, 1.95), (0.695, 1.5)))


def test_a_series_counts_once() -> None:
    runs = smallest_runs()
    assert {run.layout.devices for run in runs if run.model.name == "GPT3-175B"} == {128}
    assert len({run.key for run in runs}) == len(runs)
