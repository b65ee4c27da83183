"""The constants of NeMo's stacks, and their errors on models that the fit has not seen."""

from __future__ import annotations

import pytest

from benchmarks.planner.leave_one_model_out import (
    EXPERT_DEVICES,
    EXPERT_SHARE,
    GEMM,
    PAGE,
    SPEEDUP,
    Errors,
    ExpertErrors,
    all_runs,
    fit,
    is_fp8,
    mean_square,
    smallest,
    table,
)
from benchmarks.published.datasets import machine_path
from benchmarks.published.predict import cluster_rates
from frontier_llm.experiments.measure.ceilings import ceilings_of
from frontier_llm.machine.load import load_machine
from frontier_llm.machine.schema import Number


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Return the lines of the table, which are computed once."""
    return list(table(all_runs()))


@pytest.mark.thorough
def test_the_page_and_the_machine_file_have_the_fitted_constants(lines: list[str]) -> None:
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")
    (fitted,) = (line for line in lines if line.startswith("| none"))
    gemm, speedup = (float(cell) for cell in fitted.split("|")[2:4])
    numbers = cluster_rates("eos", "nemo-24.09-fp8")
    assert (numbers.gemm_efficiency, numbers.linear_speedup) == (gemm, speedup)
    assert cluster_rates("eos", "nemo-24.09").linear_speedup == 1.0


@pytest.mark.thorough
def test_models_that_the_fit_has_not_seen_are_within_their_limits(lines: list[str]) -> None:
    goals = {"CP, BF16": 5.0, "CP, FP8": 5.0, "dense, BF16": 5.0, "dense, FP8": 6.0}
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    errors = {cells[0]: float(cells[2].removesuffix("%")) for cells in rows if cells[0] in goals}
    assert errors.keys() == goals.keys()
    assert all(errors[kind] <= goal for kind, goal in goals.items()), errors


def test_the_fit_finds_the_best_constants_of_its_grid() -> None:
    runs = [run for run in smallest(all_runs()) if run.model.name == "Nemotron4-340B"][:2]
    errors = Errors()
    best = mean_square(runs, errors, fit(runs, errors))
    assert best < 0.03**2
    assert best <= min(mean_square(runs, errors, constants) for constants in ((0.595, 1.95), (0.695, 1.5)))


def test_a_series_counts_once() -> None:
    runs = smallest(all_runs())
    assert {run.layout.devices for run in runs if run.model.name == "GPT3-175B"} == {128}
    assert len({run.key for run in runs}) == len(runs)


@pytest.mark.thorough
def test_the_machine_file_has_the_fitted_factors_of_experts() -> None:
    errors = ExpertErrors()
    rows = list(errors.runs.values())
    assert min(run.layout.devices for run in rows) == EXPERT_DEVICES
    for fp8, stack in ((False, "nemo-24.09"), (True, "nemo-24.09-fp8")):
        share = errors.fit([run for run in rows if is_fp8(run) == fp8])
        assert cluster_rates("eos", stack).grouped_share == share


def test_no_fitted_rate_exceeds_its_ceiling() -> None:
    limits = ceilings_of("sm_90")
    gemm = limits["gemm_efficiency"].value
    speedup = limits["linear_speedup"].value
    numbers = cluster_rates("eos", "nemo-24.09")
    in_fp8 = cluster_rates("eos", "nemo-24.09-fp8")
    assert max(GEMM) <= gemm
    assert max(SPEEDUP) <= speedup
    assert numbers.gemm_efficiency * max(EXPERT_SHARE) <= gemm
    assert in_fp8.linear_speedup * max(in_fp8.grouped_share, 1.0) <= speedup


@pytest.mark.parametrize("stack", ["nemo-24.09", "nemo-24.09-fp8"])
def test_at_most_four_constants_of_a_stack_are_fitted(stack: str) -> None:
    numbers = dict(load_machine(str(machine_path("eos"))).stacks[stack])
    sources = [number.source for number in numbers.values() if isinstance(number, Number)]
    fitted = [source for source in sources if "leave_one_model_out" in source]
    assert 2 <= len(fitted) <= 4


def test_attention_is_not_fitted() -> None:
    for stack in ("nemo-24.09", "nemo-24.09-fp8"):
        numbers = load_machine(str(machine_path("eos"))).stacks[stack]
        assert "arXiv:2407.08608" in numbers.flash_efficiency.source
        assert "FlashAttention-3" in numbers.flash_backward.source
