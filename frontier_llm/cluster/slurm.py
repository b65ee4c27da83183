"""The few Slurm commands that the package runs; arguments as lists, never through a shell."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from frontier_llm import log
from frontier_llm.cluster.sites import walltime_s
from frontier_llm.errors import FrontierError
from frontier_llm.run import hostlist
from frontier_llm.run.rank_env import environ

ACTIVE = frozenset(
    {
        "PENDING",
        "RUNNING",
        "CONFIGURING",
        "COMPLETING",
        "SUSPENDED",
        "REQUEUED",
        "REQUEUE_HOLD",
        "RESIZING",
        "SIGNALING",
    }
)
_NO_CLUSTER = re.compile(r"configuration source|Unable to contact slurm controller|Could not establish")
_AWAY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|standby mode|did not answer "
    r"within"
)
# a controller is restarted within minutes; a run of 384 nodes must not end for that
PATIENCE_S = 900.0
PAUSE_S = 10.0
_BAD_STATES = ("down", "drain", "fail", "unknown", "error", "power", "no_respond", "reboot", "not_responding")


@dataclass(frozen=True)
class Allocation:
    """The job that this batch shell runs in."""

    job_id: str
    nodes: tuple[str, ...]
    batch_host: str
    tasks_per_node: int
    cpus_per_task: int

    @classmethod
    def from_environment(cls) -> Allocation:
        """Read SLURM_*; raises FrontierError naming what is missing when this is no job."""
        needed = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS_PER_NODE", "SLURMD_NODENAME")
        missing = [name for name in needed if environ(name) is None]
        if missing:
            raise FrontierError(
                f"{', '.join(missing)} not set",
                "start this with sbatch, with --ntasks-per-node",
                "job",
            )
        return cls(
            job_id=str(environ("SLURM_JOB_ID")),
            nodes=hostlist.expand(str(environ("SLURM_JOB_NODELIST"))),
            batch_host=str(environ("SLURMD_NODENAME")),
            tasks_per_node=int(str(environ("SLURM_NTASKS_PER_NODE"))),
            cpus_per_task=int(environ("SLURM_CPUS_PER_TASK", "1") or 1),
        )


def call(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> str:
    """stdout of a Slurm command. Raises FrontierError with its own message when it fails or does not exist."""
    try:
        done = subprocess.run(  # noqa: S603 a list
            list(command),
            cwd=cwd,
            env=env,
            capture_output=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise FrontierError(
            f"there is no {command[0]} here",
            "run this on a login node of a Slurm cluster",
            command[0],
        ) from error
    except subprocess.TimeoutExpired as error:
        raise FrontierError(
            f"{command[0]} did not answer within {timeout_s:.0f} s",
            "try again when the Slurm controller answers",
            command[0],
        ) from error
    if done.returncode:
        complaint = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        fix = "run this where Slurm's commands work (try sinfo)" if _NO_CLUSTER.search(done.stderr) else ""
        raise FrontierError(complaint[-1] if fix else "\n".join(complaint), fix, " ".join(command[:3]))
    return done.stdout


def ask(command: Sequence[str], patience_s: float = PATIENCE_S) -> str:
    """`call` for the supervisor of a running job: a controller that is away is asked again. Only for commands that
    may be given twice.
    """
    started_s = time.monotonic()
    warned = False
    while True:
        try:
            return call(command)
        except FrontierError as error:
            if not _AWAY.search(str(error)) or time.monotonic() - started_s > patience_s:
                raise
            if not warned:
                log.warn(
                    f"the Slurm controller does not answer {command[0]}; asking again for {patience_s / 60:.0f} minutes"
                )
            warned = True
            time.sleep(PAUSE_S)


def unhealthy(nodes: Sequence[str]) -> list[str]:
    """Those of `nodes` that Slurm calls down, draining, failing or not answering, or that did not get the job's
    environment.
    """
    text = ask(["sinfo", "--noheader", "--Node", f"--nodes={hostlist.compress(nodes)}", "--format=%N|%T"])
    states = [line.strip().split("|") for line in text.splitlines() if "|" in line]
    bad = set(hostlist.expand(environ("FRONTIER_LLM_BROKEN_NODES") or ""))  # launch/job.sh
    bad |= {name for name, state in states if state.endswith("*") or any(word in state.lower() for word in _BAD_STATES)}
    return [node for node in nodes if node in bad]


def time_left_s(job_id: str) -> float | None:
    """Seconds until the job's walltime ends, or None when it has no limit."""
    # None: UNLIMITED, NOT_SET, INVALID
    return walltime_s(ask(["squeue", "--noheader", f"--jobs={job_id}", "--format=%L"]).strip())


def job_fields(job_id: str) -> dict[str, str]:
    """`scontrol show job` as a mapping; empty when Slurm has forgotten or never knew the job."""
    try:
        text = call(["scontrol", "show", "job", "--oneliner", job_id])
    except FrontierError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def cluster_name() -> str | None:
    """ClusterName of the Slurm that this machine belongs to; None if no Slurm answers."""
    if named := environ("SLURM_CLUSTER_NAME"):
        return named
    try:
        text = call(["scontrol", "show", "config"], timeout_s=20.0)
    except FrontierError:
        return None
    found = re.search(r"^ClusterName\s*=\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else None


def is_active(job_id: str) -> bool:
    """True while the job waits or runs."""
    return job_fields(job_id).get("JobState") in ACTIVE


def requeue(job_id: str) -> None:
    """Put this job back into the queue; Slurm then ends the batch shell, the caller included."""
    ask(["scontrol", "requeue", job_id])
