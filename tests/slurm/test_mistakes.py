"""The table of planted mistakes: who refuses, with which message, and that no training step was taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.mistakes import MISTAKES, Mistake, meet, told
from tests.harness.slurm import LocalSlurm

EVERY_DAY = ("CUDA torch on an AMD site", "a module that is gone")
ROWS = [pytest.param(row, id=row.name, marks=() if row.name in EVERY_DAY else pytest.mark.thorough) for row in MISTAKES]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mistake", ROWS)
def test_each_planted_mistake_is_refused_before_a_training_step(
    cluster: LocalSlurm, tmp_path: Path, mistake: Mistake
) -> None:
    outcome = meet(cluster, mistake, tmp_path)
    assert tuple(refusal.by for refusal in outcome.refusals) == mistake.refused_by, outcome.refusals
    for refusal in outcome.refusals:
        assert refusal.exit_code != 0 and mistake.message in refusal.text, refusal.text
        assert "Traceback" not in refusal.text
        assert refusal.steps == 0
        print(f"{mistake.name}: {refusal.by} after {refusal.seconds:.0f} s: {told(refusal, mistake, tmp_path)}")
    assert cluster.queued() == []
