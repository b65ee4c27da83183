"""`checkpoint push` and `checkpoint pull` beside a run's own uploads and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint.remote import uploaded_checkpoints
from frontier_llm.checkpoint.remote_writer import read_writer
from frontier_llm.cli.main import main
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.run.uploads import UploadRecord, read_uploads, write_uploads
from tests.unit.checkpoint.serial import Run

pytest.importorskip("fsspec")


def test_a_push_to_another_url_keeps_the_record_of_train_remote(run: Run, url: str) -> None:
    """Regression: the record was replaced, and with it the abandoned steps that must not be loaded."""
    run_dir = run.checkpoints.directory.parent
    record = UploadRecord("me", "s3://bucket/run", uploaded_step=6, discard_above=4, branched_at=2)
    write_uploads(run_dir, record)
    assert main(["checkpoint", "push", str(run_dir), url]) == 0
    assert read_uploads(run_dir) == record
    writer = read_writer(RemoteFolder(url))
    assert writer is not None and writer.name == "me" and writer.is_released


def test_a_push_deletes_the_steps_that_a_rewind_has_abandoned(run: Run, url: str, tmp_path: Path) -> None:
    """Regression: the next start of the run deleted the steps that the push had sent."""
    run_dir = run.checkpoints.directory.parent
    assert main(["checkpoint", "push", str(run_dir), url]) == 0
    record = read_uploads(run_dir)
    assert record is not None and record.uploaded_step == 4
    write_uploads(run_dir, replace(record, discard_above=2))  # the store did not respond during the rewind
    folder.delete_checkpoint(run.checkpoints.directory, 4, 1)
    again = Run(run_dir)
    again.save(3)
    again.checkpoints.close()
    assert main(["checkpoint", "push", str(run_dir), url]) == 0
    record = read_uploads(run_dir)
    assert record is not None and (record.uploaded_step, record.discard_above) == (3, None)
    assert [one.step for one in uploaded_checkpoints(RemoteFolder(url))] == [3, 2]
    assert main(["checkpoint", "push", str(run.checkpoints.directory / "step_00000002"), url]) == 0
    record = read_uploads(run_dir)
    assert record is not None and record.uploaded_step == 3


def test_a_push_refuses_a_url_at_which_another_run_directory_has_continued(
    run: Run, url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: the push deleted the other run directory's steps, as steps that a rewind has abandoned."""
    run_dir = run.checkpoints.directory.parent
    assert main(["checkpoint", "push", str(run_dir), url]) == 0
    record = read_uploads(run_dir)
    assert record is not None
    write_uploads(run_dir, replace(record, branched_at=4, discard_above=2))  # the store could not be reached
    other = Run(tmp_path / "other")
    other.save(6)
    other.checkpoints.close()
    assert main(["checkpoint", "push", str(tmp_path / "other"), url, "--take-over"]) == 0
    capfd.readouterr()
    assert main(["checkpoint", "push", str(run_dir), url]) == 2
    assert "has step 6 of another run directory" in capfd.readouterr().err
    assert [one.step for one in uploaded_checkpoints(RemoteFolder(url))] == [6, 4, 2]
    writer = read_writer(RemoteFolder(url))
    assert writer is not None and writer.run_dir == str((tmp_path / "other").resolve())


def test_a_push_of_a_path_that_does_not_exist_is_refused(run: Run, url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "push", str(run.checkpoints.directory / "step_00000999"), url]) == 2
    assert "contains no complete checkpoint" in capfd.readouterr().err
    assert read_uploads(run.checkpoints.directory.parent) is None


def test_a_pull_below_a_damaged_local_checkpoint_is_what_a_run_loads(
    run: Run, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = run.checkpoints.directory.parent
    assert main(["checkpoint", "push", str(run_dir), url]) == 0
    (run.checkpoints.directory / "step_00000004" / "manifest.json").write_text("{}")
    capfd.readouterr()
    assert main(["checkpoint", "pull", url, str(run_dir), "--step", "2"]) == 0
    assert capfd.readouterr().out.rstrip().endswith("continues from it")
    assert folder.read_latest(run.checkpoints.directory) == "step_00000002"


def test_a_pull_below_a_newer_local_checkpoint_names_the_step_that_a_run_loads(
    run: Run, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: the message and LATEST named the pulled step, but a run loads the highest step."""
    run_dir = run.checkpoints.directory.parent
    assert main(["checkpoint", "push", str(run_dir), url]) == 0
    capfd.readouterr()
    assert main(["checkpoint", "pull", url, str(run_dir), "--step", "2"]) == 0
    shown = capfd.readouterr()
    assert "has newer checkpoints, so a run continues from step 4, unless you move step_00000004" in shown.err
    assert shown.out.rstrip().endswith("continues from step 4")
    assert folder.read_latest(run.checkpoints.directory) == "step_00000004"
    assert Run(run_dir).checkpoints.newest().step == 4
