"""The table of planted mistakes: who refuses, with which message, and that no training step was taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness import mistakes
from tests.harness.mistakes import MISTAKES, Mistake, Place, meet, told
from tests.harness.slurm import LocalSlurm

EVERY_DAY = ("CUDA torch on an AMD site", "stale kernels")
ROWS = [pytest.param(row, id=row.name, marks=() if row.name in EVERY_DAY else pytest.mark.thorough) for row in MISTAKES]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mistake", ROWS)
def test_each_planted_mistake_is_refused_before_a_training_step(cluster: LocalSlurm, tmp_path: Path, mistake: Mistake) -> None:
    outcome = meet(cluster, mistake, tmp_path)
    assert tuple(refusal.by for refusal in outcome.refusals) == mistake.refused_by, outcome.refusals
    for refusal in outcome.refusals:
        assert refusal.exit_code != 0 and mistake.message in refusal.text, refusal.text
        assert "Traceback" not in refusal.text
        assert refusal.steps == 0
        print(f"{mistake.name}: {refusal.by} after {refusal.seconds:.0f} s: {told(refusal, mistake, tmp_path)}")
    assert cluster.queued() == []


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_an_installation_without_a_mistake_is_accepted_up_to_the_ranks(cluster: LocalSlurm, tmp_path: Path) -> None:
    """Without this row a check that refuses everything would pass. Only the GPU itself is missing here, and the ranks say so."""
    nothing = replace(
        MISTAKES[0], name="nothing", torch=mistakes.RENAMED.format(patch=mistakes.ROCM), refused_by=("ranks",), message="sees no GPU"
    )
    outcome = meet(cluster, nothing, tmp_path)
    (refusal,) = outcome.refusals
    assert (refusal.by, refusal.steps) == ("ranks", 0) and "sees no GPU" in refusal.text, refusal.text
    words = [*mistakes.TOY, f"train.run_dir={tmp_path}/orion/other", "--dry-run"]
    accepted = mistakes._submit(cluster, Place(tmp_path), nothing, words, tmp_path / "orion" / "other")
    assert accepted.exit_code == 0, accepted.text
