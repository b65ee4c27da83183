"""Notes on a run's schedule (the rules of shapes are tested with the files that break them, in test_load.py)."""

from __future__ import annotations

import pytest

from frontier_llm.config import load_run, warmup_note


@pytest.mark.parametrize(
    ("warmup", "steps", "warned"),
    [(20, 200, False), (199, 200, False), (200, 200, True), (20, 5, True)],
)
def test_a_warmup_longer_than_the_run_is_said(warmup: int, steps: int, warned: bool) -> None:
    note = warmup_note(load_run("train_small", [f"optimizer.warmup_steps={warmup}", f"train.steps={steps}"]))
    assert bool(note) == warned
    if warned:
        assert (
            f"optimizer.warmup_steps={warmup} is not less than train.steps={steps}, so the learning rate rises" in note
        )
