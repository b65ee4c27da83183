from __future__ import annotations

import pytest

from frontier_llm.cluster.job import split_flags
from frontier_llm.errors import FrontierError


def test_flags_of_train_may_stand_anywhere_after_the_run_file() -> None:
    words = ["run.yaml", "train.steps=8", "--allow-change", "train.steps", "--strict", "batch.micro_batch=1", "--allow-change=model"]
    assert split_flags(words) == (
        ("run.yaml", "train.steps=8", "batch.micro_batch=1"),
        ("--allow-change", "train.steps", "--strict", "--allow-change=model"),
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run.yaml", "--alow-change", "x"], "--allow-change"),
        (["run.yaml", "--allow-change"], "needs the name"),
        (["--strict"], "no run file"),
    ],
)
def test_other_flags_are_refused_before_any_rank_starts(words: list[str], expected: str) -> None:
    with pytest.raises(FrontierError, match=expected):
        split_flags(words)
