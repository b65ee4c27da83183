"""Tests the lock of a run directory. Only one start of a run can use the directory, and an earlier start can neither
write nor delete checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint.lock import RunLock, Superseded
from frontier_llm.errors import CheckpointError, FrontierError
from frontier_llm.run import holder
from frontier_llm.run.holder import STALE_AFTER_S, this_process
from tests.unit.checkpoint.serial import Run, in_child, progress


def test_second_job_leaves_at_once_naming_the_holder(tmp_path: Path) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        RunLock(tmp_path, this_process("4711"))
        os.write(write, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(read, 1)
        started = time.monotonic()
        with pytest.raises(
            CheckpointError,
            match=rf"is in use by job 4711 on {os.uname().nodename} \(pid {pid}, since 20.*its process is alive",
        ):
            RunLock(tmp_path, this_process("4712"))
        assert time.monotonic() - started < 30.0  # a wait for a stale lock takes STALE_AFTER_S, 60 s
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead but not yet reaped: a zombie holds no lock
        assert RunLock(tmp_path, this_process("4712")).incarnation == 2
        os.waitpid(pid, 0)


def test_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    assert (
        in_child(lambda: (RunLock(tmp_path, this_process()), os.kill(os.getpid(), signal.SIGKILL))) == -signal.SIGKILL
    )
    lock = RunLock(tmp_path, this_process())
    assert lock.incarnation == 2
    lock.release()


def holder_elsewhere(tmp_path: Path, silent_s: float, **changes: object) -> Path:
    (tmp_path / "incarnations").mkdir()
    path = tmp_path / "incarnations" / "00000001.json"
    path.write_text(json.dumps({**vars(this_process("12")), "host": "n7", **changes}))
    os.utime(path, (time.time() - silent_s,) * 2)
    return path


def test_holder_on_another_host_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    path = holder_elsewhere(tmp_path, silent_s=20)
    with pytest.raises(CheckpointError, match=r"job 12 on n7.*last heartbeat is 2. s old") as caught:
        RunLock(tmp_path, this_process("13"))
    assert "start again in" in str(caught.value)
    os.utime(path, (time.time() - STALE_AFTER_S - 1,) * 2)
    assert RunLock(tmp_path, this_process("13")).incarnation == 2


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch a heartbeat for 0.5 s instead of a minute. `RunLock` still accepts ages of up to a minute."""
    monkeypatch.setattr(holder, "STALE_AFTER_S", 0.5)
    monkeypatch.setattr(holder, "WATCH_PERIOD_S", 0.05)


def test_a_dead_holder_whose_clock_was_ahead_is_watched_and_replaced(
    tmp_path: Path, quick_watch: None, capfd: pytest.CaptureFixture[str]
) -> None:
    holder_elsewhere(tmp_path, silent_s=-7200)
    assert RunLock(tmp_path, this_process("13")).incarnation == 2
    assert "its last heartbeat is 7,200 s in the future, and no new heartbeat was seen" in capfd.readouterr().err


def test_a_living_holder_whose_clock_is_ahead_is_kept(tmp_path: Path, quick_watch: None) -> None:
    path = holder_elsewhere(tmp_path, silent_s=-7200)
    ended = threading.Event()

    def refresh() -> None:
        while not ended.wait(0.02):
            os.utime(path, (time.time() + 7200,) * 2)

    thread = threading.Thread(target=refresh)
    thread.start()
    try:
        with pytest.raises(
            CheckpointError, match=r"is in use by job 12 on n7.*in the future, and a new heartbeat was seen"
        ) as caught:
            RunLock(tmp_path, this_process("13"))
        assert f"if you know that the process is dead, delete {path}" in str(caught.value)
    finally:
        ended.set()
        thread.join()


def test_a_launcher_says_how_to_free_a_run(tmp_path: Path, quick_watch: None) -> None:
    (tmp_path / "checkpoints").mkdir()
    path = holder_elsewhere(tmp_path / "checkpoints", silent_s=-7200)
    holder.refuse_second_start(tmp_path)  # no heartbeat arrives, so the holder counts as dead
    os.utime(path)
    with pytest.raises(FrontierError, match="is in use by job 12 on n7") as caught:
        holder.refuse_second_start(tmp_path)
    assert f"if you know that the process is dead, delete {path}" in str(caught.value)


def test_the_last_number_of_a_start_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    path = holder_elsewhere(tmp_path / "checkpoints", silent_s=100)
    path.rename(last := path.with_name("99999999.json"))
    for start in (
        lambda: RunLock(tmp_path / "checkpoints", this_process("13")),
        lambda: holder.take(tmp_path, "13", "n0"),
    ):
        with pytest.raises(
            FrontierError, match="records start number 99999999 of the run, but the largest possible number is 99999999"
        ) as caught:
            start()
        assert str(last) in str(caught.value) and "if no job of this run is alive, delete the file" in str(caught.value)
    last.unlink()
    (tmp_path / "incarnation.json").write_text(
        '{"incarnation": 99999999, "job_id": "1", "host": "n0", "since_unix_s": 1.0}'
    )
    with pytest.raises(FrontierError, match=r"incarnation.json: counts 100000000 starts"):
        holder.take(tmp_path, "13", "n0")


def test_requeued_job_takes_its_own_lock_over_at_once(tmp_path: Path) -> None:
    holder_elsewhere(tmp_path, silent_s=0)
    with pytest.raises(CheckpointError):
        RunLock(tmp_path, this_process("12", restart=0))
    assert RunLock(tmp_path, this_process("12", restart=1)).incarnation == 2


def test_heartbeat_renews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontier_llm.checkpoint.lock.HEARTBEAT_S", 0.05)
    lock = RunLock(tmp_path, this_process())
    path = tmp_path / "incarnations" / "00000001.json"
    os.utime(path, (1.0, 1.0))
    deadline_s = time.monotonic() + 60
    while path.stat().st_mtime == 1.0:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    lock.release()
    assert json.loads(path.read_text())["released"] is True


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 3}', "\x00" * 50])
def test_unreadable_lock_is_taken_over(content: str, tmp_path: Path) -> None:
    (tmp_path / "incarnations").mkdir()
    (tmp_path / "incarnations" / "00000001.json").write_text(content)
    assert RunLock(tmp_path, this_process()).incarnation == 2


def replaced(run: Run) -> None:
    """Start a newer incarnation while the process of the old one still runs, as after a requeue that left orphans."""
    path = run.checkpoints.directory / "incarnations" / "00000001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "released": True}))


def test_stale_incarnation_cannot_begin_commit_or_prune(tmp_path: Path) -> None:
    old = Run(tmp_path)
    old.save(2, 4)
    old.fill(6)
    save = old.checkpoints.begin(progress(6))  # the old start writes its shard when the successor starts
    replaced(old)
    new = Run(tmp_path)
    assert new.checkpoints.facts.incarnation == 2
    assert new.checkpoints.newest().step == 4
    with pytest.raises(Superseded, match="incarnation 1 has been replaced by"):
        old.checkpoints.finish()
    with pytest.raises(Superseded, match="incarnation 1 has been replaced by"):
        old.checkpoints.begin(progress(8))
    old.checkpoints.keep = 0  # pruning would delete all checkpoints
    with pytest.raises(Superseded, match="incarnation 1 has been replaced by"):
        save._prune()
    assert folder.named_steps(new.checkpoints.directory) == [4, 2]
    new.save(6)
    assert new.checkpoints.newest(strict=True).step == 6
    new.check(6)
    old.checkpoints.close()  # this close must not release the successor's lock
    new.save(8)


def test_cleaning_takes_the_stale_writers_folder_away(tmp_path: Path) -> None:
    """The new incarnation removes the stale writer's folder. A stale incarnation that has passed its check then has
    nothing to rename.
    """
    old = Run(tmp_path)
    old.save(2)
    building = folder.temporary(old.checkpoints.directory, 4, 1)
    building.mkdir()
    replaced(old)
    Run(tmp_path)
    assert not building.exists()


def test_the_supervisors_count_is_the_locks(tmp_path: Path) -> None:
    """The supervisor also counts starts that ended before they took the lock."""
    RunLock(tmp_path, this_process()).release()
    old = RunLock(tmp_path, this_process("12", restart=0), 5)
    assert old.incarnation == 5
    old.check()
    new = RunLock(tmp_path, this_process("12", restart=1), 3)  # the count never decreases
    assert new.incarnation == 6
    new.check()
    with pytest.raises(Superseded, match="incarnation 5 has been replaced by"):
        old.check()
    assert sorted(path.name for path in (tmp_path / "incarnations").glob("0*")) == ["00000005.json", "00000006.json"]
    new.release()
