"""Runs `frontier-llm plan` in this process."""

from __future__ import annotations

import pytest

from frontier_llm.cli.main import main


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of `frontier-llm plan` with these words."""
    code = main(["plan", *words])
    out = capsys.readouterr()
    return code, out.out, out.err
