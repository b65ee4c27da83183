"""`check --json`: the sections of the certificate, their fields, and the exit codes 0, 1 and 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.certificate.certificate import NAMES, TYPES
from frontier_llm.cli.main import main

FIELDS = {"verdict": str, "why": str, "problems": list, "evidence": list, "seconds": float}
VERDICTS = ("passed", "refused", "not checkable here")


def checked(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> tuple[int, Any]:
    """Return exit code and content of stdout. The section `types` is left out, because it trains."""
    words = ("check", "quickstart", "data.train=synthetic", "data.validation=null", "data.tokenizer=null", *words)
    code = main([*words, f"train.run_dir={tmp_path / 'run'}", "train.tensorboard=false", "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


@pytest.fixture(autouse=True)
def without_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontier_llm.certificate.certificate._why_no_torch", lambda: "torch is left out")


def test_a_run_that_passes_has_exit_code_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, content = checked(capsys, tmp_path)
    assert code == 0
    assert content["passed"] is True
    assert list(content["sections"]) == list(NAMES)
    for name, section in content["sections"].items():
        assert {field: type(value) for field, value in section.items()} == FIELDS, name
        assert section["verdict"] in VERDICTS
        assert bool(section["why"]) == (section["verdict"] == "not checkable here")
        assert bool(section["problems"]) == (section["verdict"] == "refused")
    assert content["sections"][TYPES]["why"] == "torch is left out"
    assert "30 seconds to start (assumed)" in content["sections"]["cost"]["evidence"][1]


def test_a_refused_section_has_exit_code_1_and_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, content = checked(capsys, tmp_path, "train.profile.steps=8-9", "train.steps=4")
    assert code == 1
    assert content["passed"] is False
    (problem,) = content["sections"]["configuration"]["problems"]
    assert problem.keys() == {"where", "what", "fix"}
    assert problem["where"] == "train.profile.steps"
    assert problem["what"] and problem["fix"]


@pytest.mark.parametrize("words", [("--nodes", "2"), ("no.such_key=1",), ("--site", "nowhere", "--nodes", "2")])
def test_a_run_that_cannot_be_checked_has_exit_code_2_and_no_output(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(capsys, tmp_path, *words) == (2, None)
