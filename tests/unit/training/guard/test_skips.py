from __future__ import annotations

from pathlib import Path

import pytest

from frontier_llm.training.guard.skips import Decisions
from tests.harness.system import full_disk


def test_decisions_follow_the_course_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    decisions = Decisions(path)
    decisions.add(3, "not finite", loss="nan")
    decisions.add(7, "spike", loss="9.0")
    decisions.add(9, "spike", loss="9.5")
    # records after step 5 belong to an abandoned part of the run
    decisions.add(5, "rewind", spike_at=9, left_out_samples=2)
    assert [(entry["step"], entry["action"]) for entry in decisions.entries()] == [(3, "not finite"), (5, "rewind")]
    decisions.add(8, "spike", loss="8.0")
    with path.open("a") as file:
        file.write('{"step": 9, "act')  # truncated by a crash
    again = Decisions(path)
    again.resume_at(6, decisions.rewinds)
    assert [(entry["step"], entry["action"]) for entry in again.entries()] == [(3, "not finite"), (5, "rewind")]
    assert again.rewinds == [{"step": 5, "action": "rewind", "spike_at": 9, "left_out_samples": 2}]
    Decisions(None).add(1, "spike")


def test_a_full_disk_loses_a_decision_and_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk(tmp_path / "full") as full:
        decisions = Decisions(full / "decisions.jsonl")
        decisions.add(3, "not finite", loss="nan")
        decisions.add(2, "rewind", spike_at=9, left_out_samples=2)
        assert decisions.rewinds_to(2) == 1
    messages = capsys.readouterr().err
    assert messages.count("decisions.jsonl: No space left on device") == 2 and "'action': 'rewind'" in messages
