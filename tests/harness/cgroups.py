"""Limits the CPU time of a process with a cgroup, version 1 or 2. Needs root and writable control files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 20_000  # short, so that a few milliseconds of work are limited too
LEAST_QUOTA_US = 1000  # the kernel's minimum


def _controller() -> Path | None:
    """Return the folder in which groups with a CPU limit can be made. None if there is none."""
    first = ROOT / "cpu" / "cpu.cfs_quota_us"
    second = ROOT / "cgroup.subtree_control"
    if first.exists() and os.access(first, os.W_OK):
        return ROOT / "cpu"
    if second.exists() and os.access(second, os.W_OK) and "cpu" in second.read_text().split():
        return ROOT
    return None


def why_unavailable() -> str | None:
    """Return the reason why no CPU time can be limited here, or None."""
    folder = _controller()
    if folder is None:
        return f"no CPU controller under {ROOT} is writable"
    probe = folder / f"frontier_llm_{os.getpid()}_probe"
    try:
        probe.mkdir()
    except OSError as error:
        return f"no control group can be made in {folder}: {error.strerror}"
    probe.rmdir()
    return None


@contextmanager
def cpu_limited(share: float) -> Iterator[None]:
    """Limit this process, with all of its threads, to `share` of one core."""
    folder = _controller()
    assert folder is not None
    group = folder / f"frontier_llm_{os.getpid()}"
    quota_us = max(LEAST_QUOTA_US, round(share * PERIOD_US))
    before = _own_group(folder)
    group.mkdir()
    try:
        if folder == ROOT:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _own_group(folder: Path) -> Path:
    """Return the folder of the group that this process belongs to."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (folder == ROOT and controllers == "") or (folder != ROOT and controllers == "cpu"):
            return folder / path.lstrip("/")
    return folder
