"""scripts/quickstart.sh announces the seconds of its parts, and its next command starts a new run.

The next command does not continue a run whose learning rate has decayed.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from frontier_llm.config import load_run, warmup_note
from frontier_llm.experiments import quickstart
from frontier_llm.experiments.quickstart import QuickstartPart, State, expected_s

SCRIPT = (Path(__file__).resolve().parents[3] / "scripts" / "quickstart.sh").read_text(encoding="utf-8")
PARTS = re.findall(r'^ *part "?([a-z]+(?: \d)?)"? "', SCRIPT, flags=re.MULTILINE)


@pytest.fixture(autouse=True)
def _empty_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty directory, with a shipped machine file in place of the measured file, and a shipped run in place of the
    planned run.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "MACHINE", Path("local"))
    monkeypatch.setattr(quickstart, "PLANNED", Path("quickstart"))


def test_each_part_has_seconds_that_grow_with_the_first_measurement() -> None:
    assert PARTS == ["data", "calibrate", "plan", "training 1", "training 2", "report"]
    assert f"--budget-s {quickstart.BUDGET_S:g} " in SCRIPT
    for name in PARTS:
        fast = expected_s(name, State(start_s=3.0, text_s=1.0))
        slow = expected_s(name, State(start_s=30.0, text_s=10.0))
        assert 0 < fast < slow, name


def test_the_first_training_corrects_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(start_s=3.0, text_s=1.0)
    start_s = state.training_start_s
    predicted_s = expected_s("training 2", state)
    announced_s = start_s + 50.0
    state.parts.append(QuickstartPart("training 1", announced_s, begin_s=100.0, end_s=100.0 + start_s + 3 * 50.0))
    assert expected_s("training 2", state) == pytest.approx(start_s + 3 * (predicted_s - start_s))
    monkeypatch.setattr(quickstart, "newest_complete", lambda _: 160)
    assert expected_s("training 2", state) == start_s, "the run is complete, so that nothing is trained"


def test_announced_and_measured_seconds_are_side_by_side(capsys: pytest.CaptureFixture) -> None:
    quickstart.STATE.parent.mkdir(parents=True)
    parts = [QuickstartPart("data", 7.0, begin_s=100.0, end_s=109.0), QuickstartPart("plan", 2.0, begin_s=109.0)]
    quickstart.STATE.write_text(json.dumps(asdict(State(3.0, 1.0, parts))))
    quickstart.main(["begin", "report"])
    quickstart.main(["end"])
    announced, head, *rows = capsys.readouterr().out.splitlines()
    assert announced == "about 2 s"
    assert head.split() == ["part", "announced", "s", "measured", "s"]
    assert rows[0].split() == ["data", "7", "9"]
    assert [row.split()[0] for row in rows] == ["data", "plan", "report", "all"]


def test_the_next_command_starts_a_run_of_its_own() -> None:
    words = re.search(r'next="frontier-llm train (.*?)  +#', SCRIPT)
    assert words
    settings = [word for word in words[1].split() if "=" in word]
    (folder,) = (word.partition("=")[2] for word in settings if word.startswith("train.run_dir="))
    assert "$" not in folder and folder not in re.findall(r"run_dir=(\S+)", SCRIPT.replace(words[0], ""))
    assert not warmup_note(load_run("quickstart", settings))
