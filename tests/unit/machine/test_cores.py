"""Tests a rank's number of threads: it follows from the CPU affinity and the container's quota, and never exceeds the
user's setting.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from frontier_llm.machine import cores
from frontier_llm.machine.cores import THREADS, WAITING, choose_threads, set_own_threads


@pytest.fixture
def computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that replaces this computer. The quotas are the cpu.max of its control groups."""
    for name in (THREADS, WAITING):
        monkeypatch.setenv(name, "")  # so that its absence is restored, too
        monkeypatch.delenv(name)

    def replace(cpus: int, per_core: int = 1, group: str = "/", **quotas: str) -> None:
        for cpu in range(cpus):
            folder = tmp_path / f"cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            first = cpu - cpu % per_core
            (folder / "thread_siblings_list").write_text(f"{first}-{first + per_core - 1}\n")
        for name, text in quotas.items():
            folder = tmp_path / "cgroup" / name.replace("root", "").replace("_", "/")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cpu.max").write_text(text + "\n")
        (tmp_path / "own").write_text(f"1:cpu:/\n0::{group}\n")
        monkeypatch.setattr(cores, "CPU_FOLDER", tmp_path / "cpu")
        monkeypatch.setattr(cores, "CGROUP_FOLDER", tmp_path / "cgroup")
        monkeypatch.setattr(cores, "OWN_CGROUP", tmp_path / "own")
        monkeypatch.setattr(cores, "affinity", lambda: set(range(cpus)))
        monkeypatch.setattr(cores.os, "cpu_count", lambda: 64)

    return replace


@pytest.mark.parametrize(("ranks", "threads"), [(1, 4), (2, 2), (3, 1), (8, 1)])
def test_cores_are_divided_over_the_ranks(computer, ranks: int, threads: int) -> None:
    computer(cpus=8, per_core=2)  # four cores of two hardware threads
    assert choose_threads(ranks).threads == threads


@pytest.mark.parametrize(
    ("group", "quotas", "threads"),
    [
        ("/", {"root": "200000 100000"}, 2),
        ("/", {"root": "250000 100000"}, 2),
        ("/", {"root": "50000 100000"}, 1),
        ("/", {"root": "max 100000"}, 8),
        ("/job/step", {"job": "300000 100000", "job_step": "max 100000"}, 3),
    ],
)
def test_the_quota_of_the_container_limits_the_threads(computer, group: str, quotas, threads: int) -> None:
    computer(cpus=8, group=group, **quotas)
    assert choose_threads(1).threads == threads


def test_a_rank_of_its_own_gets_threads_that_sleep(computer, capsys) -> None:
    computer(cpus=8, root="200000 100000")
    set_own_threads()
    assert (os.environ[THREADS], os.environ[WAITING]) == ("2", "PASSIVE")
    assert "threads: 2 per rank (the container's quota of 2 CPUs, 1 rank)" in capsys.readouterr().err


def test_the_users_setting_takes_precedence(computer, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    computer(cpus=8)
    monkeypatch.setenv(THREADS, "3")
    monkeypatch.setenv(WAITING, "ACTIVE")
    set_own_threads()
    assert (os.environ[THREADS], os.environ[WAITING]) == ("3", "ACTIVE")
    assert capsys.readouterr().err == ""
