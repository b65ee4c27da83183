"""Daemon threads: a heartbeat goes on where a file system fails for a while."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from frontier_llm.threads import Heartbeat


def test_a_heartbeat_outlives_a_failing_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touches, enough = [], threading.Event()

    def touch(path: Path) -> None:
        touches.append(path)
        if len(touches) < 3:
            raise OSError(5, "Input/output error")
        enough.set()

    monkeypatch.setattr(os, "utime", touch)
    heartbeat = Heartbeat(tmp_path / "lock", 0.001)
    assert enough.wait(60)
    heartbeat.stop()
    assert touches[0] == tmp_path / "lock"
