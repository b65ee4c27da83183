"""A start that never ends, because another rank is stopped, ends by itself with stacks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontier_llm.cluster.signals import SignalWatcher
from frontier_llm.config import load_run
from frontier_llm.train import loop


def test_a_rank_that_waits_for_ever_at_the_start_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def stuck(*_: object) -> Iterator[None]:
        time.sleep(60)
        yield

    monkeypatch.setattr(loop, "joined_state", stuck)
    config = load_run("quickstart", [f"train.run_dir={tmp_path}", "train.timeout_s=1"])
    started_s, pid = time.monotonic(), os.fork()
    if pid == 0:
        loop.train(config, None, SignalWatcher())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert time.monotonic() - started_s < 30
