"""The names that coming_from.md gives for this project exist."""

from __future__ import annotations

import re

from pydantic import BaseModel

from frontier_llm.cli.main import COMMANDS
from frontier_llm.config import RunConfig
from tests.docs.pages import ROOT

ROWS = [
    line.split(" | ")
    for line in (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]
SECTIONS = "|".join(RunConfig.model_fields)


def keys(section: type[BaseModel], prefix: str = "") -> set[str]:
    found = set()
    for name, field in section.model_fields.items():
        found.add(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= keys(field.annotation, f"{prefix}{name}.")
    return found


def test_the_keys_named_here_are_keys_of_a_run() -> None:
    named = {
        key
        for row in ROWS
        for code in re.findall(r"`([^`]+)`", row[-1])
        for key in re.findall(rf"^(?:{SECTIONS})\.[a-z_]+", code)
    }
    assert len(named) > 60
    assert named - keys(RunConfig) == set()


def test_the_commands_named_here_are_commands() -> None:
    named = {command for row in ROWS for command in re.findall(r"`frontier-llm ([a-z]+)", row[-1])}
    assert len(named) > 8
    assert named - set(COMMANDS) == set()
