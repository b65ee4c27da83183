"""docs/generated/planner_accuracy.md is the output of the program that writes it."""

from __future__ import annotations

import pytest

from benchmarks.planner.accuracy_page import (
    FIGURE,
    PAGE,
    ceilings,
    figure,
    judge,
    page,
    readings,
    without_repetitions,
)
from benchmarks.published.datasets import FURTHER, PUBLISHED, read_stated


@pytest.mark.thorough
def test_the_page_has_each_row_of_the_mi250x() -> None:
    """Each row has its prediction, and the largest error is first."""
    text = PAGE.read_text(encoding="utf-8")
    rows, without = judge(read_stated(PUBLISHED / FURTHER[0]))
    assert without == []
    for one in rows:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {one.row.key} |")]
        assert f"| {100 * one.error:+.1f} % |" in line
    listed = page(rows, without).partition("## Every row")[2]
    worst = max(rows, key=lambda one: abs(one.error))
    assert listed.index(worst.row.key) == min(listed.index(one.row.key) for one in rows)
    assert figure(rows).count("<circle") == len(rows)


def test_the_page_lists_each_fitted_constant_above_its_ceiling() -> None:
    lines = list(ceilings())
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")
    machines = set()
    for line in lines[2:]:
        machine, _, _ = line.partition(",")
        machines.add(machine)
    assert machines == {
        "| vtrain-a100",
        "| vtrain-a100-node",
        "| jean-zay",
    }


def test_a_measurement_that_another_release_repeats_is_one_row() -> None:
    """Two releases state the same ten step times of Nemotron-4 340B. Rows with a different time or in FP8 are kept."""
    rows = [one for one in read_stated(PUBLISHED / "dgxc_dense.tsv") if "Nemotron4-340B" in one.key]
    kept = without_repetitions(rows)
    assert (len(rows), len(kept)) == (20, 10)
    assert kept == without_repetitions([*kept, *kept])
    llama = [one for one in read_stated(PUBLISHED / "dgxc_dense.tsv") if "Llama-3.1-8B" in one.key]
    assert without_repetitions(llama) == llama


@pytest.mark.thorough
def test_the_page_is_up_to_date() -> None:
    rows, without = judge(readings())
    assert PAGE.read_text(encoding="utf-8") == page(rows, without), "run python -m benchmarks.planner.accuracy_page"
    assert FIGURE.read_text(encoding="utf-8") == figure(rows)
