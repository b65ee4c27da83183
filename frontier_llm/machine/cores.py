"""Chooses the number of threads per rank on this computer, from the CPU affinity of this process and the container's
CPU quota.

The computer's load is not used, because a resumed run would otherwise compute with another number of threads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from frontier_llm import log
from frontier_llm.run.rank_env import adopt, environ
from frontier_llm.units import plural

THREADS = "OMP_NUM_THREADS"
WAITING = "OMP_WAIT_POLICY"
# Threads that spin while they wait take the cores from other processes. On a computer with 20 other busy processes, a
# training step with two spinning threads took more than ten times as long as with two sleeping threads.
SLEEP = "PASSIVE"
CPU_FOLDER = Path("/sys/devices/system/cpu")
CGROUP_FOLDER = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class ThreadChoice:
    """Number of threads of each rank, and its reason."""

    threads: int
    reason: str

    def variables(self) -> dict[str, str]:
        """Return the variables of OpenMP, which torch reads at its import."""
        return {THREADS: str(self.threads), WAITING: SLEEP}

    def describe(self) -> str:
        """Return 'threads: 2 per rank (2 cores of the affinity, 1 rank); waiting threads sleep'."""
        return f"threads: {self.threads} per rank ({self.reason}); waiting threads sleep ({WAITING}={SLEEP})"


def choose_threads(num_ranks: int) -> ThreadChoice:
    """Distribute the cores that this process may use over `num_ranks` ranks. Each rank gets at least one thread."""
    cores = physical_cores(affinity(), CPU_FOLDER)
    reason = f"{plural(cores, 'core')} of the affinity"
    quota = cpu_quota(CGROUP_FOLDER, OWN_CGROUP)
    if quota is not None and quota < cores:
        cores = max(1, int(quota))
        reason = f"the container's quota of {quota:g} CPUs"
    return ThreadChoice(max(1, cores // num_ranks), f"{reason}, {plural(num_ranks, 'rank')}")


def set_own_threads() -> None:
    """Set and log the number of threads of this process, which is the only rank. Exported variables take precedence.

    Call this before torch is imported.
    """
    if environ(THREADS) is not None:
        adopt({WAITING: SLEEP})
        return
    choice = choose_threads(1)
    adopt(choice.variables())
    log.info(choice.describe())


def affinity() -> set[int]:
    """Return the numbers of the CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores(cpus: set[int], folder: Path) -> int:
    """Return the number of cores that these CPUs belong to. Two hardware threads of a core count once."""
    cores = set()
    for cpu in cpus:
        try:
            cores.add((folder / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii").strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def cpu_quota(folder: Path, own: Path) -> float | None:
    """Return the smallest quota of this process's control groups (cgroup v2), in CPUs. None without a quota."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if group is None:
        return None
    path = folder / group
    quotas = [_quota_of(each / "cpu.max") for each in (path, *path.parents) if each.is_relative_to(folder)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(path: Path) -> float | None:
    """Return the quota in a file such as '150000 100000' (CPU time and length of a period, both in microseconds)."""
    try:
        time_us, period_us = path.read_text(encoding="ascii").split()
        return int(time_us) / int(period_us)
    except (OSError, ValueError, ZeroDivisionError):  # 'max 100000' is no quota
        return None
