"""The convergence study's rules, and its page, which must agree with its results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.convergence import dense
from benchmarks.harness import MEASURED, RESULTS, ROOT, write_measured


def test_every_rung_gets_its_budget() -> None:
    recipes = [dense.recipe(name, dense.TOKENS_PER_PARAMETER) for name in dense.LADDER]
    assert len(recipes) >= 4 and [r.parameters for r in recipes] == sorted(r.parameters for r in recipes)
    for recipe in recipes:
        assert recipe.tokens / recipe.parameters == pytest.approx(20, rel=0.005)
        assert recipe.tokens == recipe.steps * recipe.global_batch * 256
        assert dense.EVALUATED_SAMPLES % recipe.global_batch == recipe.global_batch % dense.MICRO_BATCH == 0
    assert [r.lr for r in recipes] == sorted((r.lr for r in recipes), reverse=True)
    # Equation 1 of arXiv:2401.02954, by hand for C = 1e12: 0.3118 * 10**-1.5 and 0.292 * 10**3.9252.
    assert pytest.approx(0.00986, rel=1e-3) == 0.3118 * 1e12**-0.125 and recipes[1].lr == pytest.approx(
        0.00991, rel=1e-3
    )


def test_curves_are_compared_and_thinned() -> None:
    reference = [3.0 - 0.01 * step for step in range(100)]
    apart = dense.apart(
        [value + (0.5 if step == 3 else 0.1 * (step >= 90)) for step, value in enumerate(reference)], reference
    )
    assert apart == {
        "first_50": pytest.approx(0.5),
        "largest": pytest.approx(0.5),
        "mean_of_last_tenth": pytest.approx(0.1),
    }
    thinned = dense.thin(reference, 10)
    assert thinned[-1][0] == 100 and thinned[0] == [1, 3.0] and len(thinned) <= 10


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    mark = "<!-- measured: written by benchmarks/data/any.py -->"
    program = str(ROOT / "benchmarks" / "data" / "any.py")
    page.write_text(f"before\n{mark}\nold\n<!-- /measured -->\nafter\n")
    write_measured(page, program, "new\n")
    write_measured(page, program, "newer\n")
    assert page.read_text() == f"before\n{mark}\nnewer\n<!-- /measured -->\nafter\n"
    page.write_text("no marker")
    with pytest.raises(SystemExit, match="no place for the results"):
        write_measured(page, program, "new\n")


def test_the_page_says_what_was_measured() -> None:
    result = json.loads((RESULTS / "convergence.json").read_text(encoding="utf-8"))
    assert dense.page(result) in (MEASURED / "convergence.md").read_text(encoding="utf-8")
    losses = [rung["loss"] for rung in result["ladder"]]
    assert len(losses) >= 4 and losses == sorted(losses, reverse=True)
