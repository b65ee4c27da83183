"""docs/architecture.md names the files of one training step. No other file of the package may run in a step, and the
files stay few and short.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.harness.pool import RankPool
from tests.harness.tokens import count_tokens
from tests.parity.cases import Case
from tests.parity.three_steps import build

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "frontier_llm"
MOST_FILES = 16
MOST_TOKENS = 19_500
MOST_LEAVES = 12


def listed(heading: str) -> list[str]:
    """Return the files named in a section of docs/architecture.md."""
    section = (
        (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    )
    return list(dict.fromkeys(re.findall(r"`(\w+(?:/\w+)*\.py)`", section)))


def files_of_one_step(rank: int, case: Case) -> list[str]:
    """Return the package's files whose functions run during a step, without the build before it."""
    from frontier_llm.training.step import train_step

    state = build(rank, case)
    train_step(state)  # the first step includes one-time work
    names: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            names.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        train_step(state)
    finally:
        sys.setprofile(None)
    return sorted(Path(name).relative_to(PACKAGE).as_posix() for name in names if Path(name).is_relative_to(PACKAGE))


@pytest.mark.thorough
def test_every_file_that_runs_in_a_step_is_on_the_reading_path_or_a_named_leaf(ranks: RankPool) -> None:
    path = listed("One training step")
    leaves = listed("Leaves")
    case = Case("llama", tp=2, pp=2, dp=2, sequence_parallel=True)
    ran = set().union(*ranks.run(case.world_size, files_of_one_step, case))
    assert len(ran) > 10
    assert sorted(ran - {*path, *leaves}) == []
    assert len(leaves) <= MOST_LEAVES


def test_the_reading_path_is_short() -> None:
    path = listed("One training step")
    tokens = sum(count_tokens((PACKAGE / name).read_text(encoding="utf-8")) for name in path)
    assert len(path) <= MOST_FILES and tokens <= MOST_TOKENS, (len(path), tokens)
