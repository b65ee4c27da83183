"""`frontier-llm list` names everything that other commands accept by name, with one line about each."""

from __future__ import annotations

import json

import pytest

from frontier_llm import schedule
from frontier_llm.cli.list import KINDS
from frontier_llm.cli.main import main
from frontier_llm.cluster.sites import site_names
from frontier_llm.config import available
from frontier_llm.inference.task_prompts import LM_EVAL
from frontier_llm.schedule import registry

# Other test files register schedules of their own in the same process.
SHIPPED_SCHEDULES = [
    name for name in schedule.names() if schedule.rule(name).order.__module__.startswith("frontier_llm.")
]
NAMES = {
    **{kind: available(kind) for kind in ("models", "machines", "runs")},
    "schedules": SHIPPED_SCHEDULES,
    "sites": site_names(),
    "tasks": list(LM_EVAL),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_has_one_line(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_RULES", {name: schedule.rule(name) for name in SHIPPED_SCHEDULES})
    assert main(["list", kind, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == NAMES[kind]
    assert [row["name"] for row in rows if not 10 <= len(row["about"]) <= 160] == []
    assert main(["list", kind]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 3
