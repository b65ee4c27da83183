"""A second start in the directory of a live run is refused before any file is changed."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster.local import run_local_ranks
from frontier_llm.cluster.status import read_status
from frontier_llm.errors import FrontierError
from frontier_llm.run.failure import FILE
from frontier_llm.run.holder import STALE_AFTER_S, Holder, living_holder, this_process


def held_by(run_dir: Path, holder: Holder, number: int = 3) -> Path:
    path = run_dir / "checkpoints" / "incarnations" / f"{number:08}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(holder.to_bytes())
    return path


def test_who_is_alive(tmp_path: Path) -> None:
    assert living_holder(tmp_path) is None
    mine = this_process()
    path = held_by(tmp_path, mine)
    assert living_holder(tmp_path) == mine
    held_by(tmp_path, replace(mine, process_start="1"))  # another process has the same process id now
    assert living_holder(tmp_path) is None
    held_by(tmp_path, replace(mine, released=True))
    assert living_holder(tmp_path) is None
    held_by(tmp_path, replace(mine, host="elsewhere"))
    assert living_holder(tmp_path) is not None
    os.utime(path, (time.time() - STALE_AFTER_S - 1,) * 2)
    assert living_holder(tmp_path) is None


def test_a_process_that_proc_hides_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with the mount option hidepid of /proc, a live process of another user counted as dead."""
    other = replace(this_process(), pid=os.getppid(), process_start="12345")
    held_by(tmp_path, other)
    assert living_holder(tmp_path) is None
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert living_holder(tmp_path) == other
    held_by(tmp_path, replace(other, pid=0))  # damaged
    assert living_holder(tmp_path) is None


def test_the_living_ranks_logs_and_record_stay(tmp_path: Path) -> None:
    held_by(tmp_path, this_process())
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank_0.log").write_text("what the living rank said\n")
    (tmp_path / FILE).write_text("{}")
    started_s = time.monotonic()
    with pytest.raises(FrontierError, match="is in use by a process on"):
        run_local_ranks(2, ["train", "quickstart"], dict(os.environ), logs, run_dir=tmp_path)
    assert time.monotonic() - started_s < 20.0  # two ranks would train for minutes
    assert (logs / "rank_0.log").read_text() == "what the living rank said\n" and (tmp_path / FILE).read_text() == "{}"


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_train_and_its_check_see_that_a_directory_is_in_use(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    held_by(tmp_path, this_process())
    assert main(["train", "quickstart", f"train.run_dir={tmp_path}", *flags]) == 2
    assert "is in use by" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_status_shows_a_local_run_as_living(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "loss": 1.0}) + "\n")
    assert read_status(tmp_path).state == "not queued"
    held_by(tmp_path, this_process())
    assert (read_status(tmp_path).state, read_status(tmp_path).nodes) == ("running", this_process().host)
