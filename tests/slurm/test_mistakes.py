"""The table of planted mistakes: which program refuses, with which message, and that no training step was taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.mistakes import MISTAKES, Mistake, meet
from tests.harness.slurm import ROOT, LocalSlurm

PAGE = ROOT / "docs" / "generated" / "planted_mistakes.md"
# CI tests one mistake of each kind. Unit tests of `cluster/readiness.py` test the messages of the others.
EVERY_DAY = ("CUDA torch on an AMD site", "a module that is gone")
IN_CI = (
    "none: only the GPU is missing",
    "kernels of another architecture",
    "missing data",
    "run directory full",
)


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a row, by its name."""
    if name in EVERY_DAY:
        return []
    return [pytest.mark.thorough] if name in IN_CI else [pytest.mark.thorough, pytest.mark.exhaustive]


ROWS = [pytest.param(row, id=row.name, marks=marks(row.name)) for row in MISTAKES]


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mistake", ROWS)
def test_each_planted_mistake_is_refused_before_a_training_step(
    cluster: LocalSlurm, tmp_path: Path, mistake: Mistake
) -> None:
    outcome = meet(cluster, mistake, tmp_path)
    assert tuple(refusal.by for refusal in outcome.refusals) == mistake.refused_by, outcome.refusals
    for refusal in outcome.refusals:
        assert mistake.message in refusal.text, refusal.text
        assert "Traceback" not in refusal.text, refusal.text
        if refusal.by == "ranks":
            assert refusal.failure is not None and refusal.failure.cause == mistake.cause, refusal.text
        # A job that lost a node ends with 0 if it is not to be continued.
        assert refusal.exit_code != 0 or mistake.cause == "node failure", refusal.text
    assert outcome.step_count == 0
    assert cluster.queued() == []


@pytest.mark.thorough
def test_the_page_has_a_row_for_each_refusal() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = lines[lines.index("| mistake | refused by | after s | message |") + 2 :]
    rows = [line.strip("| ").split(" | ") for line in table]
    assert [(row[0], row[1]) for row in rows] == [
        (mistake.name, by) for mistake in MISTAKES for by in mistake.refused_by
    ]
    assert all(len(row) == 4 for row in rows), "a message is missing"
