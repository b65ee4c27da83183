"""Tests the cache of sample indices: one process builds a file and all other processes wait. A dead builder is
replaced, and a damaged file is named.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontier_llm.data import cache
from frontier_llm.data.cache import cached_array, is_alive
from frontier_llm.errors import DataError
from frontier_llm.run import holder
from tests.harness.system import full_disk


def build_slowly(path: str, log: str) -> int:
    def build(out: Any) -> None:
        with open(log, "a") as handle:
            handle.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        out[:] = np.arange(out.size)

    return int(cached_array(Path(path), 100, np.uint64, build).sum())


def test_one_of_many_processes_builds(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        sums = pool.starmap(build_slowly, [(str(tmp_path / "x" / "a.npy"), str(tmp_path / "log"))] * 3, chunksize=1)
    assert sums == [4950] * 3
    assert len((tmp_path / "log").read_text().split()) == 1
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["a.npy"]


def test_a_dead_builders_lock_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "STALE_S", 0.3)
    monkeypatch.setattr(cache, "POLL_S", 0.02)
    (tmp_path / "a.lock").write_text("gone 1\n")
    assert build_slowly(str(tmp_path / "a.npy"), str(tmp_path / "log")) == 4950


def test_a_process_with_the_pid_of_a_dead_builder_does_not_hold_its_lock(tmp_path: Path) -> None:
    """Regression: in a restarted container, all processes waited for a process with the same pid."""
    (tmp_path / "a.lock").write_text(f"{socket.gethostname()} {os.getppid()} 12345\n")
    assert build_slowly(str(tmp_path / "a.npy"), str(tmp_path / "log")) == 4950


@pytest.mark.parametrize("third", ["9" * 64, "a1" * 32, ""])
def test_a_live_lock_of_an_older_version_is_respected(third: str, tmp_path: Path) -> None:
    """Regression: the digest in its third word was compared with the start time of the process."""
    lock = tmp_path / "a.lock"
    lock.write_text(f"{socket.gethostname()} {os.getppid()} {third}\n")
    assert is_alive(lock)
    lock.write_text(f"{socket.gethostname()} {2**22 + 1} {third}\n")  # above the largest pid of Linux
    assert not is_alive(lock)


def test_a_lock_of_another_user_is_respected_if_proc_hides_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with the mount option hidepid of /proc, /proc/PID/stat of a live process cannot be read."""
    monkeypatch.setattr(holder, "process_start", lambda pid: None)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    lock = tmp_path / "a.lock"
    lock.write_text(f"{socket.gethostname()} {os.getppid()} 12345\n")
    assert is_alive(lock)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """Regression: a write to the memory map ended the process with SIGBUS."""
    with full_disk(tmp_path / "small", room_kib=64, fill=False) as small:
        with pytest.raises(DataError, match="cannot write: No space left on device"):
            cached_array(small / "a.npy", 100_000, np.uint64, lambda out: out.fill(1))
        assert list(small.iterdir()) == []


def test_a_living_builders_lock_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(cache, "STALE_S", 3.0)
    monkeypatch.setattr(cache, "POLL_S", 0.02)
    monkeypatch.setattr(cache, "HEARTBEAT_S", 0.05)
    built = []

    def build(out: Any) -> None:
        built.append(1)
        time.sleep(3.5)
        out[:] = 1

    threads = [threading.Thread(target=cached_array, args=(tmp_path / "a.npy", 3, np.uint64, build)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(out: Any) -> None:
        raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        cached_array(tmp_path / "a.npy", 3, np.uint64, build)
    assert list(tmp_path.iterdir()) == []


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"is not a \.npy array(?s:.*)delete"):
        cached_array(path, 3, np.uint64, lambda out: None)
    np.save(path, np.zeros(2, np.uint64))
    with pytest.raises(DataError, match=r"expected uint64\[3\], found uint64\[2\]"):
        cached_array(path, 3, np.uint64, lambda out: None)
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="is not"):
        cached_array(path, 1, np.uint64, lambda out: None)


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write(?s:.*)data\.cache_dir"):
        cached_array(tmp_path / "file" / "a.npy", 3, np.uint64, lambda out: None)
