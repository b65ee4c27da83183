"""Uploads of a running job: no checkpoint is lost locally or at the URL, whatever the store does."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from frontier_llm.certificate.restart import remote_problems
from frontier_llm.checkpoint import checkpoints
from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint.remote import NotCopied, RemoteCheckpoint, uploaded_checkpoints
from frontier_llm.checkpoint.remote_writer import claim, read_writer, release, this_writer
from frontier_llm.checkpoint.upload import Uploads
from frontier_llm.checkpoint.upload_process import _answers
from frontier_llm.cli.main import main
from frontier_llm.cluster.status import read_status
from frontier_llm.cluster.status_text import render
from frontier_llm.data.remote import UnreachableError
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.errors import UNREACHABLE, CheckpointError
from frontier_llm.run.uploads import read_uploads
from tests.unit.checkpoint.serial import CONFIG, Run, in_child, progress

pytest.importorskip("fsspec")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


def started(directory: Path, url: str, on_wait: Callable[[], object] = lambda: None) -> Run:
    run = Run(directory, remote=url, on_wait=on_wait)
    run.loaded = run.checkpoints.newest()
    return run


def remote_steps(url: str) -> list[int]:
    return [one.step for one in uploaded_checkpoints(RemoteFolder(url))]


def hide_store(tmp_path: Path) -> None:
    """Let the store fail: a file takes the place of its directory."""
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("a file in place of the store")


def show_store(tmp_path: Path) -> None:
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")


def wait_for(condition: Callable[[], bool], longest_s: float) -> None:
    end_s = time.monotonic() + longest_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.thorough
def test_kept_checkpoints_are_uploaded_and_the_higher_step_that_is_intact_wins(tmp_path: Path, url: str) -> None:
    run = started(tmp_path / "run", url)
    assert run.loaded is None
    run.save(2, 4, 6)
    run.checkpoints.close()  # waits for the uploads
    assert set(remote_steps(url)) >= {4, 6}
    record = read_uploads(tmp_path / "run")
    assert record is not None and record.pending == () and record.problem == "" and record.uploaded_step in (4, 6)
    writer = read_writer(RemoteFolder(url))
    assert writer is not None and writer.is_released

    (tmp_path / "run" / "metrics.jsonl").touch()
    shown = render([read_status(tmp_path / "run")])
    assert re.search(rf"remote +step {record.uploaded_step} uploaded .* ago$", shown, re.MULTILINE), shown

    # the local copy of step 6 is damaged: the remote copy replaces it
    flip(tmp_path / "run" / "checkpoints" / "step_00000006" / "shard_00000.safetensors")
    again = started(tmp_path / "run", url)
    assert again.loaded.step == 6
    again.check(6)
    again.save(8)
    again.checkpoints.close()

    # another machine: the remote checkpoint is the only one
    moved = started(tmp_path / "moved", url)
    assert moved.loaded.step == 8
    moved.check(8)
    assert folder.leftovers(moved.checkpoints.directory) == []

    # the first run directory has lost the URL to the other directory
    with pytest.raises(CheckpointError, match="is written by"):
        started(tmp_path / "run", url)
    train = CONFIG.train.model_copy(update={"run_dir": str(tmp_path / "run"), "remote": url})
    (problem,) = remote_problems(CONFIG.model_copy(update={"train": train}))
    assert "is written by" in problem.what
    moved.checkpoints.close()


def test_marks_of_several_threads_are_no_answer() -> None:
    """A progress mark is a plus sign and an end of line. Another thread may write its own mark between the two."""
    assert _answers(b"+\n++\n\n+\n") == []
    assert _answers(b"+\n++\n\nnull\n") == [b"null"]


@pytest.mark.thorough
def test_a_rewind_removes_remote_checkpoints_although_the_store_does_not_answer(tmp_path: Path, url: str) -> None:
    run = started(tmp_path / "run", url)
    run.save(2, 4)
    wait_for(lambda: set(remote_steps(url)) == {2, 4}, 60)
    run.checkpoints.uploads._run = lambda request, longest_s=0.0: {"kind": "unreachable", "text": "no answer"}
    assert run.checkpoints.rewind(2).step == 2
    run.checkpoints.close(verify=False)
    assert set(remote_steps(url)) == {2, 4}
    again = started(tmp_path / "run", url)
    assert again.loaded.step == 2
    wait_for(lambda: remote_steps(url) == [2], 60)
    again.checkpoints.close()


def test_a_store_that_cannot_be_reached(tmp_path: Path, url: str) -> None:
    (tmp_path / "store").write_text("a file in place of the store")
    with pytest.raises(CheckpointError, match="store"):
        started(tmp_path / "new", url)  # the URL can contain checkpoints, so a start at step 0 would be wrong
    local = Run(tmp_path / "run")
    local.save(2, 4)
    local.checkpoints.close()
    run = started(tmp_path / "run", url)
    assert run.loaded.step == 4
    wait_for(lambda: read_uploads(tmp_path / "run").problem != "", 60)
    run.save(6)
    run.checkpoints.close(verify=False)  # does not wait for uploads, as after a signal
    assert read_uploads(tmp_path / "run").uploaded_step is None
    (tmp_path / "store").unlink()
    train = CONFIG.train.model_copy(update={"run_dir": str(tmp_path / "run"), "remote": url})
    assert remote_problems(CONFIG.model_copy(update={"train": train})) == []
    again = started(tmp_path / "run", url)  # continues the uploads
    again.checkpoints.close()
    assert set(remote_steps(url)) == {4, 6}


def test_a_checkpoint_that_is_being_uploaded_is_not_deleted(tmp_path: Path, url: str) -> None:
    run = started(tmp_path / "run", url)
    requests: list[str] = []
    released = threading.Event()

    def slow(request: dict, longest_s: float = 0.0) -> None:
        requests.append(request.get("checkpoint", request["task"]).rpartition("/")[2])
        released.wait(60)

    run.checkpoints.uploads._run = slow
    run.save(2)
    wait_for(lambda: requests == ["step_00000002"], 60)
    run.save(4, 6, 8)
    assert folder.named_steps(run.checkpoints.directory) == [8, 6, 2]  # 2 is protected, 4 was left out
    released.set()
    run.checkpoints.close()
    assert requests == ["step_00000002", "step_00000008", "step_00000006", "release"]
    run = Run(tmp_path / "run")
    run.save(10)
    assert folder.named_steps(run.checkpoints.directory) == [10, 8]
    run.checkpoints.close()


def test_a_upload_ends_when_another_run_directory_takes_the_url(tmp_path: Path, url: str) -> None:
    run = started(tmp_path / "run", url)
    claim(RemoteFolder(url), this_writer("other", tmp_path / "other"), take_over=True)
    run.save(2)
    run.checkpoints.close()
    record = read_uploads(tmp_path / "run")
    assert record is not None and "is written by" in record.problem
    assert remote_steps(url) == []
    shutil.rmtree(tmp_path / "store")


def test_a_stalled_upload_is_ended(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = Uploads(url, tmp_path, tmp_path / "checkpoints", 0.0, list)
    monkeypatch.setattr("frontier_llm.checkpoint.remote.STALL_S", -1.0)
    problem = uploads._run({"task": "release"})
    assert problem is not None and problem["text"].startswith("the object store accepted no data")


@pytest.mark.thorough
def test_a_rank_that_waits_for_the_store_reports_progress(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a run on one rank makes no collective while it waits, so the watchdog ended the run after 540 s."""
    reports: list[str] = []
    three_reports = threading.Event()

    def report() -> None:
        reports.append("")
        if len(reports) >= 3:
            three_reports.set()

    def slow(*_: object, **__: object) -> None:
        assert three_reports.wait(60)

    run = started(tmp_path / "run", url)
    run.checkpoints.uploads._run = slow
    run.save(2)
    run.checkpoints.on_wait = report  # a save reports too
    run.checkpoints.close()
    assert len(reports) >= 3 and read_uploads(tmp_path / "run").pending == ()

    copied = (tmp_path / "copied").as_uri()
    source = started(tmp_path / "source", copied)
    source.save(2)
    source.checkpoints.close()
    reports.clear()
    three_reports.clear()
    pull = checkpoints.pull
    monkeypatch.setattr(checkpoints, "pull", lambda *given, **named: (slow(), pull(*given, **named)))
    moved = started(tmp_path / "moved", copied, report)
    assert moved.loaded.step == 2 and len(reports) >= 3
    moved.checkpoints.close()


def test_a_stop_request_ends_the_wait_for_uploads(tmp_path: Path, url: str) -> None:
    run = started(tmp_path / "run", url)
    released = threading.Event()
    run.checkpoints.uploads._run = lambda request, longest_s=0.0: released.wait(60) and None
    run.save(2)
    asked: list[int] = []

    def is_stopped() -> bool:
        asked.append(len(asked))
        if len(asked) == 3:
            released.set()
        return len(asked) == 3

    run.checkpoints.close(is_stopped=is_stopped)
    assert len(asked) == 3


@pytest.mark.thorough
def test_the_record_of_an_interrupted_run_names_its_last_save(tmp_path: Path, url: str) -> None:
    run = started(tmp_path / "run", url)
    uploads = run.checkpoints.uploads
    uploads._run = lambda request, longest_s=0.0: uploads._stopped.wait(60) and None
    run.save(2)
    wait_for(lambda: read_uploads(tmp_path / "run").pending == (2,), 60)
    run.save(4)
    run.checkpoints.close(verify=False)
    assert read_uploads(tmp_path / "run").pending == (4, 2)


@pytest.mark.thorough
def test_a_run_continues_from_a_local_checkpoint_if_the_remote_one_cannot_be_copied(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a failed copy ended the start, although a local checkpoint was intact."""
    run = started(tmp_path / "run", url)
    run.save(2, 4, 6)
    run.checkpoints.close()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")

    def cut(*_: object) -> None:
        raise UnreachableError("cannot be read: the connection was cut", where=url)

    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(RemoteCheckpoint, "read_shard", cut)
        again = started(tmp_path / "run", url)
        again.check(4)
        again.checkpoints.close(verify=False)
        patch.setattr(RemoteCheckpoint, "read_shard", Mock(side_effect=full))
        again = started(tmp_path / "run", url)
        again.check(4)
        again.checkpoints.close(verify=False)
        log = capsys.readouterr().err
        assert log.count("step_00000006 cannot be copied from") == 2, log
        assert "the connection was cut" in log and "No space left on device" in log
        patch.setattr(RemoteCheckpoint, "read_shard", cut)
        again = Run(tmp_path / "run", remote=url)
        with pytest.raises(CheckpointError, match="the connection was cut"):
            again.checkpoints.newest(strict=True)
        release(RemoteFolder(url), again.checkpoints.uploads._writer)
        with pytest.raises(NotCopied, match="the connection was cut"):
            started(tmp_path / "new", url)  # nothing local: a start at step 0 would be wrong
        claim(RemoteFolder(url), again.checkpoints.uploads._writer, take_over=True)
        again = started(tmp_path / "run", url)
        again.checkpoints.close(verify=False)
        assert 6 in remote_steps(url)  # no later step was saved, so the next start can still use step 6
        again = started(tmp_path / "run", url)
        again.save(5)
        again.checkpoints.close()
    assert max(remote_steps(url)) == 5
    again = started(tmp_path / "run", url)
    again.check(5)
    again.checkpoints.close()


@pytest.mark.thorough
def test_a_later_checkpoint_of_another_run_directory_is_never_passed_over(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start fails and may be repeated, because a start from an older step would make a second history."""
    run = started(tmp_path / "run", url)
    run.save(2)
    run.checkpoints.close()
    moved = started(tmp_path / "moved", url)
    moved.save(4)
    moved.checkpoints.close()
    with monkeypatch.context() as patch:
        patch.setattr(RemoteCheckpoint, "read_shard", Mock(side_effect=UnreachableError("was cut", where=url)))
        with pytest.raises(NotCopied, match="was cut") as caught:
            started(tmp_path / "run", url)
    assert (caught.value.exit_code, caught.value.cause) == (1, UNREACHABLE)
    again = started(tmp_path / "run", url)
    again.check(4)
    again.checkpoints.close()


@pytest.mark.thorough
@pytest.mark.parametrize("is_store_back_for_the_uploads", [True, False])
def test_two_histories_are_never_mixed(
    tmp_path: Path, url: str, is_store_back_for_the_uploads: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run continues from its local checkpoint while the store does not respond. Another run directory has continued
    the same run before.
    """
    run = started(tmp_path / "run", url)
    run.save(2)
    run.checkpoints.close()
    moved = started(tmp_path / "moved", url)
    moved.save(6)
    moved.checkpoints.close()
    hide_store(tmp_path)
    again = started(tmp_path / "run", url)
    again.check(2)
    if is_store_back_for_the_uploads:
        show_store(tmp_path)
    again.save(4)
    again.checkpoints.close(verify=is_store_back_for_the_uploads)
    if not is_store_back_for_the_uploads:
        show_store(tmp_path)
    assert read_uploads(tmp_path / "run").branched_at == 2
    again = started(tmp_path / "run", url)
    again.check(4)  # the run continues its own history, although step 6 of the other run directory is higher
    again.checkpoints.close()
    assert remote_steps(url) == [6, 2]
    assert "two histories" in capsys.readouterr().err
    assert main(["checkpoint", "pull", url, str(tmp_path / "run"), "--take-over"]) == 0
    again = started(tmp_path / "run", url)
    again.check(6)
    again.checkpoints.close()


def test_a_stalled_upload_does_not_claim_again(tmp_path: Path, url: str) -> None:
    """Regression: an upload claimed the URL, and its first push stalled. It then claimed the URL again, although
    another run directory had claimed it in between.
    """
    run = Run(tmp_path / "run", remote=url)
    uploads = run.checkpoints.uploads
    requests: list[str] = []
    serve = uploads._run

    def stall(request: dict, longest_s: float = 600.0) -> dict | None:
        requests.append(request["task"])
        if requests == ["claim", "push"]:  # another run directory takes the URL while the first push stalls
            other = this_writer("other", tmp_path / "other")
            claim(RemoteFolder(url), other, take_over=True)
            release(RemoteFolder(url), other)
            return {"kind": "unreachable", "text": "the store accepted nothing for 600 s"}
        return serve(request, longest_s)

    uploads._run = stall
    run.save(2)
    wait_for(lambda: requests == ["claim", "push", "push"], 60)
    run.checkpoints.close()
    assert remote_steps(url) == [] and requests.count("claim") == 1
    shutil.rmtree(tmp_path / "store")


def test_a_store_that_sends_nothing_ends_the_copy(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(tmp_path / "run", url)
    run.save(2)
    run.checkpoints.close()
    released = threading.Event()
    monkeypatch.setattr("frontier_llm.checkpoint.remote.STALL_S", 0.0)
    monkeypatch.setattr(RemoteCheckpoint, "read_shard", lambda *_: released.wait(60))
    assert main(["checkpoint", "pull", url, str(tmp_path / "copy")]) == 2
    assert "sent nothing for 0 s" in capsys.readouterr().err
    released.set()


def test_a_run_that_loads_no_checkpoint_uploads(tmp_path: Path, url: str) -> None:
    """Regression: a `Trainer` without `restore` never uploaded."""
    run = Run(tmp_path / "run", remote=url)
    run.save(2)
    run.checkpoints.close()
    assert remote_steps(url) == [2]


def test_a_start_after_a_crash_continues_the_uploads(tmp_path: Path, url: str) -> None:
    def crash() -> None:
        run = started(tmp_path / "run", url)
        run.checkpoints.uploads._run = lambda request, longest_s=0.0: threading.Event().wait(60)
        run.save(2)
        os._exit(7)

    assert in_child(crash) == 7
    assert remote_steps(url) == []
    with pytest.raises(CheckpointError, match="is written by"):  # the crashed run did not release the URL
        started(tmp_path / "other", url)
    again = started(tmp_path / "run", url)
    again.checkpoints.close()
    assert remote_steps(url) == [2]


def test_the_first_upload_claims_a_url_that_did_not_answer_at_the_start(tmp_path: Path, url: str) -> None:
    """Regression: the first upload renewed a claim that was never made, and stopped because of a released claim."""
    place = RemoteFolder(url)
    other = this_writer("other", tmp_path / "other")
    claim(place, other)
    release(place, other)
    hide_store(tmp_path)
    local = Run(tmp_path / "run")
    local.save(2)
    local.checkpoints.close()
    run = started(tmp_path / "run", url)
    show_store(tmp_path)
    run.checkpoints.close()
    assert remote_steps(url) == [2]
    shutil.rmtree(tmp_path / "store")


def test_a_run_continues_after_a_save_without_uploads(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoints.begin(progress(2))
    run.checkpoints.close()
    assert not (tmp_path / "remote.json").exists()
