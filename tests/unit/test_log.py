"""A log message that cannot be written because the disk is full neither raises an error nor changes the exit code."""

from __future__ import annotations

import sys

import pytest

from frontier_llm import log
from frontier_llm.cli import main as cli
from tests.harness.system import FullDisk


def test_a_message_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    log.info("one")
    log.warn("two")


def test_it_does_not_change_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(cli, "main", lambda: 75)
    monkeypatch.setattr(cli.os, "_exit", end)
    monkeypatch.setattr(sys, "stderr", FullDisk())
    with pytest.raises(SystemExit) as caught:
        cli.entry()
    assert caught.value.code == 75
