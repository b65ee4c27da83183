"""Stop and save requests by files in the run directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from frontier_llm.comm import single
from frontier_llm.run.signals import SignalWatcher
from frontier_llm.training.guard import RequestCollector, Requests


def test_save_requests_one_save_and_stop_remains(tmp_path: Path) -> None:
    collector = RequestCollector(SignalWatcher(), tmp_path, single("world"), torch.device("cpu"))
    assert collector.own() == Requests()
    (tmp_path / "SAVE").touch()
    (tmp_path / "STOP").touch()
    assert collector.own() == Requests(stop=True, save=True)
    assert collector.own() == Requests(stop=True, save=False)


def test_an_error_of_the_file_system_is_no_request_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    collector = RequestCollector(SignalWatcher(), tmp_path, single("world"), torch.device("cpu"))
    (tmp_path / "SAVE").mkdir()
    assert collector.own() == Requests()
    assert "SAVE requests no save, because it cannot be deleted" in capsys.readouterr().err
    monkeypatch.setattr(Path, "stat", stale)
    assert collector.own() == Requests()
