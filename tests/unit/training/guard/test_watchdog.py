"""A rank that has to exit does so, even if no file can be written any more."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from frontier_llm.comm import dump_flight_record, serial_mesh
from frontier_llm.config import TrainConfig
from frontier_llm.config.schema import TimeoutConfig
from frontier_llm.errors import RankFailure
from frontier_llm.model import Microbatch
from frontier_llm.run.failure import STUCK, Evidence, Failure, read_failure, write_failure
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import build_state
from frontier_llm.training.guard.cause import Inquiry
from frontier_llm.training.guard.watchdog import Watchdog
from tests.harness.system import FullDisk, full_disk
from tests.parity.cases import Case
from tests.parity.three_steps import Source


class Ended(BaseException):
    pass


@pytest.fixture
def watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    """The watchdog of a run whose directory can no longer be written."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr("frontier_llm.training.guard.watchdog.os._exit", end)
    watchdog = Watchdog(TrainConfig(run_dir=str(tmp_path / "run")), serial_mesh(), TimeoutConfig())
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").touch()
    return watchdog


def test_stuck(watchdog: Watchdog, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Ended, match=str(STUCK)):
        watchdog._give_up()
    assert "last collectives in nowhere (Not a directory)" in capsys.readouterr().err


def test_failed(watchdog: Watchdog, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Ended, match="1"):
        watchdog._leave(Failure("boom", Evidence.EXCEPTION, rank=0, host="n0", step=17, section="train"))
    assert "failed first, at step 17 (train): boom" in capsys.readouterr().err


def test_failed_with_a_full_disk_under_its_log(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    with pytest.raises(Ended, match="1"):
        watchdog._leave(Failure("boom", Evidence.EXCEPTION, rank=0, host="n0", step=17, section="train"))


def test_stuck_with_a_store_that_answers_nonsense(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(symptom: str) -> Failure:
        raise KeyError("progress")

    monkeypatch.setattr(watchdog._inquiry, "find", find)
    with pytest.raises(Ended, match=str(STUCK)):
        watchdog._give_up()


def test_stacks_are_written_when_the_collective_gives_up_before_the_watching_thread_has_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    def wait_for_a_frozen_peer() -> None:
        watchdog._moved_s -= 1000  # simulates a pause of the process
        raise RankFailure("timed out")

    monkeypatch.setattr("frontier_llm.training.guard.watchdog.os._exit", end)
    monkeypatch.setattr(Inquiry, "alone", False)
    monkeypatch.setattr(Watchdog, "_watch", lambda self: None)
    watchdog = Watchdog(TrainConfig(run_dir=str(tmp_path)), serial_mesh(), TimeoutConfig())
    with pytest.raises(Ended, match="1"), watchdog.guarding():
        wait_for_a_frozen_peer()
    assert "in wait_for_a_frozen_peer" in (tmp_path / "logs" / "stacks_rank_00000.txt").read_text()


def test_a_full_disk_does_not_hide_what_a_rank_failed_of(tmp_path: Path) -> None:
    with full_disk(tmp_path / "full") as full:
        assert dump_flight_record(serial_mesh(), full, "boom") == "nowhere (No space left on device)"
        write_failure(full, Failure("boom", Evidence.EXCEPTION, rank=0, host="n0", step=17, section="train"))
        (full / "filler").unlink()
        assert list(full.iterdir()) == []
        write_failure(full, Failure("another rank's", Evidence.EXCEPTION, rank=1, host="n0", step=17, section="train"))
        failure = read_failure(full)
        assert failure is not None and failure.rank == 1


def test_each_microbatch_of_a_rank_without_collectives_is_progress(tmp_path: Path) -> None:
    case = Case("llama")
    config = case.config("fp32")
    mesh = serial_mesh()
    state = build_state(config, make_plan(config, 1), mesh, torch.device("cpu"), Source(case, 0))
    watchdog = Watchdog(TrainConfig(run_dir=str(tmp_path)), mesh, TimeoutConfig())
    places = [watchdog._place()]

    def microbatch(index: int) -> Microbatch:
        places.append(watchdog._place())
        return state.feed.microbatch(0, index, 1)

    with torch.no_grad():
        state.evaluator.run(microbatch)
    state.sync.begin()
    state.pipeline.run(microbatch)
    assert len(places) > 2 and len(set(places)) == len(places), "the watchdog sees every microbatch"


def test_a_longer_timeout_of_an_axis_is_respected(tmp_path: Path) -> None:
    train = TrainConfig(run_dir=str(tmp_path), timeout_s=10.0)
    assert Watchdog(train, serial_mesh(), TimeoutConfig(tp=1.0))._timeout_s == 9.0
    assert Watchdog(train, serial_mesh(), TimeoutConfig(tp=1.0, dp=100.0))._timeout_s == 90.0
