"""Folders of killed processes are removed by a later start. Folders of running processes and of other owners stay."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from frontier_llm.run.job_secret import folder_of, private_folder
from frontier_llm.run.node_folders import IN_USE, STALE_AFTER_S, remove_stale, temporary_folder

PROGRAM = """
import sys, time
from pathlib import Path
from frontier_llm.run.job_secret import private_folder
from frontier_llm.run.node_folders import temporary_folder
if sys.argv[1] == "launcher":
    with temporary_folder() as folder:
        print(folder, flush=True)
        time.sleep(600)
print(private_folder(b"x" * 64), flush=True)
time.sleep(600)
"""


def age(folder: Path) -> None:
    """Set the folder's time of change to long ago."""
    old_s = time.time() - 2 * STALE_AFTER_S
    os.utime(folder, (old_s, old_s))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FRONTIER_LLM_NODE_LOCAL", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.mark.parametrize("role", ["launcher", "rank"])
def test_what_a_killed_process_has_left_is_removed_by_the_next(role: str, root: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, role], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir() and folder.parent == root
    age(folder)
    assert remove_stale(root) == [] and folder.is_dir()  # the process of this folder is still running
    process.kill()
    process.wait()
    private_folder(b"y" * 64) if role == "rank" else temporary_folder().__enter__()
    assert not folder.exists()


def test_what_others_made_stays(root: Path, tmp_path: Path) -> None:
    kept = [root / f"frontier-llm-{name * 8}" for name in "abcdef"]
    for folder in kept:
        folder.mkdir(mode=0o700)
        (folder / IN_USE).touch()
    young, open_to_others, without_lock, linked, of_another_user, another_name = kept
    open_to_others.chmod(0o755)
    (without_lock / IN_USE).unlink()
    (linked / IN_USE).unlink()
    (tmp_path / "precious").touch()
    (linked / IN_USE).symlink_to(tmp_path / "precious")
    os.chown(of_another_user, 12345, -1) if os.getuid() == 0 else of_another_user.chmod(0o750)
    another_name = another_name.rename(root / "frontier-llm-X")
    (root / "frontier-llm-link0000").symlink_to(another_name)
    for folder in (open_to_others, without_lock, linked, of_another_user, another_name):
        age(folder)
    before = sorted(root.iterdir())
    assert remove_stale(root) == [] and sorted(root.iterdir()) == before
    age(young)
    assert remove_stale(root) == [young]


def test_a_folder_that_is_made_again_is_held_again(root: Path) -> None:
    folder = private_folder(b"z" * 64)
    (folder / IN_USE).unlink()
    folder.rmdir()
    assert private_folder(b"z" * 64) == folder == folder_of(b"z" * 64)
    age(folder)
    assert remove_stale(root) == [] and (folder / IN_USE).exists()
