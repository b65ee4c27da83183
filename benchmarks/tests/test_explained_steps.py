"""The changes from ORNL's runs to the predictions, as the pages print them, are those of the program."""

from __future__ import annotations

import pytest

from benchmarks.harness import DOCS
from benchmarks.planner.explained_steps import CASES, PAGE, explained, table


@pytest.mark.thorough
def test_the_pages_have_the_changes_that_the_planner_explains() -> None:
    found = explained([model for model, _, _ in CASES])
    assert "\n".join(table(found)) in PAGE.read_text(encoding="utf-8")
    text = " ".join((DOCS / "planner.md").read_text(encoding="utf-8").split())
    predicted_s = found["gpt-1t"].predicted_s
    assert f"853 s per step, measured with ORNL's software, to the predicted {predicted_s:.0f} s" in text
