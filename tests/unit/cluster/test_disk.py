"""Free space that a start of a run needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontier_llm.cluster.disk import first_checkpoints
from frontier_llm.config import load_run


@pytest.mark.parametrize(
    ("existing", "words", "needed"),
    [
        ((), (), 2),
        ((10,), (), 2),
        ((20, 10), (), 1),  # step 10 expires after the next save
        ((30, 20, 10), (), 1),
        # kept by keep_every: nothing expires after the next save
        ((20, 10), ("train.keep_every=10",), 2),
        ((40, 30, 20), ("train.keep_every=20",), 1),
        ((40, 20), ("train.keep_every=20",), 2),
        # step 10 may be the best checkpoint
        ((20, 10), ("train.keep_best=validation", "data.validation=synthetic", "train.eval_interval=10"), 2),
        ((30, 20, 10), ("train.keep_best=validation", "data.validation=synthetic", "train.eval_interval=10"), 1),
        # only the last save is left
        ((90,), ("train.save_final=true",), 1),
    ],
)
def test_checkpoints_that_need_space(
    tmp_path: Path, existing: tuple[int, ...], words: tuple[str, ...], needed: int
) -> None:
    for step in existing:
        (tmp_path / "checkpoints" / f"step_{step:08}").mkdir(parents=True)
    run = [f"train.run_dir={tmp_path}", "train.save_interval=10", "train.steps=100", "train.keep_checkpoints=2"]
    assert first_checkpoints(load_run("quickstart", [*run, *words])) == needed
