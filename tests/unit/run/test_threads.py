"""Tests daemon threads: a heartbeat continues although a file system fails for a while."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from frontier_llm.run.threads import Heartbeat


def test_a_heartbeat_outlives_a_failing_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter(range(3))
    touched = threading.Event()

    def touch(path: Path) -> None:
        if path == tmp_path / "lock":  # locks of other tests may be touched too
            if next(failures, None) is not None:
                raise OSError(5, "Input/output error")
            touched.set()

    monkeypatch.setattr(os, "utime", touch)
    heartbeat = Heartbeat(tmp_path / "lock", 0.001)
    assert touched.wait(20)
    heartbeat.stop()
