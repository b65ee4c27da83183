"""Files are replaced atomically and durably, and other users of the group can read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from frontier_llm.files import write_atomically
from tests.harness.system import full_disk


def test_a_replaced_file_is_durable_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def sync(descriptor: int) -> None:
        done.append(f"sync {'folder' if stat.S_ISDIR(os.fstat(descriptor).st_mode) else 'file'}")

    def replace(source: Path, target: Path) -> None:
        done.append("replace")
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    write_atomically(tmp_path / "untrusted_nodes.json", "[]")
    assert done == ["sync file", "replace", "sync folder"]


def test_colleagues_can_read_what_a_run_says_of_itself(tmp_path: Path) -> None:
    kept = os.umask(0o027)
    try:
        write_atomically(tmp_path / "status.json", "{}")
    finally:
        os.umask(kept)
    assert (tmp_path / "status.json").stat().st_mode & 0o777 == 0o640


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", "text")
    assert os.read(reading, 100) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reading)
    write_atomically(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()


def test_a_full_disk_names_the_file_and_keeps_no_part_of_it(tmp_path: Path) -> None:
    with full_disk(tmp_path / "full") as full:
        with pytest.raises(OSError, match=r"No space left on device: '.*/full/page\.html'"):
            write_atomically(full / "page.html", "x" * 10_000)
        assert [path.name for path in full.iterdir()] == ["filler"]
