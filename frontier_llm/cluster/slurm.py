"""Runs Slurm commands. Arguments are passed as lists, never through a shell."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from frontier_llm import log
from frontier_llm.cluster.sites import walltime_s
from frontier_llm.errors import FrontierError
from frontier_llm.run import allocations, hostlist
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
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|standby mode"
)  # texts of Slurm.
# Time for which a command is repeated. Slurm's controller restarts within minutes. A restart must not end a run of
# 384 nodes.
PATIENCE_S = 900.0
PAUSE_S = 10.0
AT_ONCE_S = 0.0  # a person's command is not repeated
_BAD_STATES = ("down", "drained", "fail", "unknown", "error", "power", "no_respond", "reboot", "not_responding")
SHARED_CONTAINER = "FRONTIER_LLM_SHARED_CONTAINER"  # set by launch/job.sh: the image that it copied to local disks
# Variables of launch/job.sh that describe one job.
_OF_ONE_JOB = (SHARED_CONTAINER, "FRONTIER_LLM_BROKEN_NODES", "FRONTIER_LLM_RANK_PYTHON")
# Inputs of Slurm's commands, also outside of a job. Other SLURM_* variables may describe one job.
_FOR_COMMANDS = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_MPI_TYPE", "SLURM_TIME_FORMAT")


class ControllerAway(FrontierError):
    """The Slurm controller does not respond. The same command may succeed later."""


@dataclass(frozen=True)
class Allocation:
    """The Slurm job in which this batch shell runs."""

    job_id: str
    nodes: tuple[str, ...]
    batch_host: str
    tasks_per_node: int
    cpus_per_task: int

    @classmethod
    def from_environment(cls) -> Allocation:
        """Read the SLURM_* variables. Raises FrontierError, which names the missing variables, outside of a job."""
        needed = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS_PER_NODE", "SLURMD_NODENAME")
        missing = [name for name in needed if environ(name) is None]
        if missing:
            raise FrontierError(
                f"variables that are not set: {', '.join(missing)}",
                "start this with sbatch and its option --ntasks-per-node",
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
    """Return the stdout of a Slurm command. Raises FrontierError with its message if it fails or does not exist."""
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
            f"{command[0]} is not on PATH",
            "run this on a login node of a Slurm cluster",
            command[0],
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ControllerAway(
            f"{command[0]} did not respond within {timeout_s:.0f} s",
            "try again when the Slurm controller responds",
            command[0],
        ) from error
    if done.returncode:
        complaint = done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"]
        fix = "run this where Slurm's commands work (try sinfo)" if _NO_CLUSTER.search(done.stderr) else ""
        error_class = ControllerAway if _AWAY.search(done.stderr) else FrontierError
        raise error_class(complaint[-1] if fix else "\n".join(complaint), fix, " ".join(command[:3]))
    return done.stdout


def ask(command: Sequence[str], patience_s: float = PATIENCE_S) -> str:
    """Run `call` for the supervisor of a running job. Retry while the controller does not respond.

    The command must be one that can safely run twice.
    """
    started_s = time.monotonic()
    warned = False
    while True:
        try:
            return call(command)
        except ControllerAway:
            if time.monotonic() - started_s >= patience_s:
                raise
            if not warned:
                log.warn(
                    f"the Slurm controller does not respond to {command[0]}; retrying for {patience_s / 60:.0f} minutes"
                )
            warned = True
            time.sleep(PAUSE_S)


@dataclass(frozen=True)
class NodeHealth:
    """The nodes of a job that cannot be used."""

    # Down, failing or not responding, removed from the job by Slurm, or without the job's environment.
    failed: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()  # not to be used for new steps, for example before a maintenance


def node_health(nodes: Sequence[str]) -> NodeHealth:
    """Return the members of `nodes` that have failed and those that drain."""
    text = ask(["sinfo", "--noheader", "--Node", f"--nodes={hostlist.compress(nodes)}", "--format=%N|%T"])
    states = [line.strip().lower().split("|") for line in text.splitlines() if "|" in line]
    bad = set(hostlist.expand(environ("FRONTIER_LLM_BROKEN_NODES") or ""))  # set by launch/job.sh
    bad |= {name for name, state in states if state.endswith("*") or any(word in state for word in _BAD_STATES)}
    job_id = environ("SLURM_JOB_ID")
    if job_id and (present := present_nodes(job_id)):
        bad |= {*nodes} - present
    draining = {name for name, state in states if state.startswith("draining")} - bad
    return NodeHealth(
        failed=tuple(node for node in nodes if node in bad),
        draining=tuple(node for node in nodes if node in draining),
    )


def present_nodes(job_id: str) -> set[str]:
    """Return the nodes that a running job still has. Empty if squeue does not list the job.

    With --no-kill, Slurm removes a node that goes down from the job for good, even if the node recovers.
    SLURM_JOB_NODELIST does not change.
    """
    lines = ask(["squeue", "--noheader", f"--jobs={job_id}", "--format=%N"]).split()
    return {node for line in lines for node in hostlist.expand(line)}


def unhealthy(nodes: Sequence[str]) -> list[str]:
    """Return the members of `nodes` that cannot be used, because they have failed or drain."""
    health = node_health(nodes)
    return [node for node in nodes if node in {*health.failed, *health.draining}]


def time_left_s(job_id: str) -> float | None:
    """Return the seconds until the job's walltime ends. None if it has no limit."""
    # walltime_s returns None for UNLIMITED, NOT_SET and INVALID
    return walltime_s(ask(["squeue", "--noheader", f"--jobs={job_id}", "--format=%L"]).strip())


def job_fields(job_id: str, patience_s: float = AT_ONCE_S) -> dict[str, str]:
    """Return the fields of `scontrol show job`. Empty if Slurm does not know the job."""
    try:
        text = ask(["scontrol", "show", "job", "--oneliner", job_id], patience_s)
    except FrontierError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def billed_node_hours(job_ids: Sequence[str], timeout_s: float = 20.0) -> dict[str, float]:
    """Return the node-hours of each job according to Slurm's accounting, requeued starts included.

    Jobs that the accounting does not know are left out. Empty without accounting.
    """
    wanted = ",".join(dict.fromkeys(job_ids))
    if not wanted:
        return {}
    options = ["--allocations", "--duplicates", "--noheader", "--parsable2", f"--jobs={wanted}"]
    try:
        text = call(["sacct", *options, "--format=JobIDRaw,AllocNodes,ElapsedRaw"], timeout_s=timeout_s)
    except FrontierError:
        return {}
    hours: dict[str, float] = {}
    for line in text.splitlines():
        job_id, *counts = line.strip().split("|")
        if len(counts) == 2 and all(count.isdecimal() for count in counts):
            nodes, seconds = map(int, counts)
            hours[job_id] = hours.get(job_id, 0.0) + nodes * seconds / 3600
    return hours


def billed_to_run(directory: Path) -> dict[str, float]:
    """Return job id → node-hours in Slurm's accounting for each job of a run. Empty without accounting."""
    return billed_node_hours([allocated.job_id for allocated in allocations.allocations(directory)])


def used_node_hours(directory: Path) -> float:
    """Return the node-hours of all jobs of a run, reconciled with Slurm's accounting if there is one."""
    return allocations.node_hours(directory, billed_to_run(directory))


@dataclass(frozen=True)
class Maintenance:
    """A maintenance reservation. No job may cross its start."""

    name: str
    starts_unix_s: float


@dataclass(frozen=True)
class _Reservation:
    """A maintenance with its end and its nodes. None stands for all nodes."""

    maintenance: Maintenance
    ends_unix_s: float
    nodes: frozenset[str] | None


def next_maintenance(now_unix_s: float, nodes: int, partition: str | None) -> Maintenance | None:
    """Return the next maintenance that has not begun and leaves fewer than `nodes` nodes of the partition.

    Several reservations can divide the nodes of one maintenance among them. None if there is none or Slurm does not
    respond.
    """
    try:
        text = call(["scontrol", "show", "reservation", "--oneliner"], timeout_s=20.0)
    except FrontierError:
        return None
    reservations = sorted(_maintenances(text), key=lambda each: each.maintenance.starts_unix_s)
    coming = [each.maintenance for each in reservations if each.maintenance.starts_unix_s > now_unix_s]
    of_partition = _nodes_of(partition) if coming else set()
    for maintenance in coming:
        left = set(of_partition)
        for each in reservations:
            if each.maintenance.starts_unix_s <= maintenance.starts_unix_s < each.ends_unix_s:
                left = set() if each.nodes is None else left - each.nodes
        if len(left) < nodes:
            return maintenance
    return None


def _maintenances(text: str) -> Iterator[_Reservation]:
    """Yield the maintenance reservations in the output of scontrol. Those without a time are left out."""
    for line in text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        flags = fields.get("Flags", "").split(",")
        if "MAINT" not in flags:
            continue
        with suppress(ValueError, KeyError, FrontierError):
            starts_unix_s = datetime.fromisoformat(fields["StartTime"]).timestamp()  # Slurm writes local time
            ends_unix_s = datetime.fromisoformat(fields["EndTime"]).timestamp()
            nodes = None if "ALL_NODES" in flags else frozenset(hostlist.expand(fields["Nodes"]))
            yield _Reservation(Maintenance(fields["ReservationName"], starts_unix_s), ends_unix_s, nodes)


def _nodes_of(partition: str | None) -> set[str]:
    """Return the nodes of a partition, or all nodes for None. Empty if Slurm does not respond."""
    command = ["sinfo", "--noheader", "--Node", "--format=%N"]
    if partition:
        command.append(f"--partition={partition}")
    try:
        return {*call(command, timeout_s=20.0).split()}
    except FrontierError:
        return set()


def cluster_name() -> str | None:
    """Return the ClusterName of this machine's Slurm. None if no Slurm responds."""
    if named := environ("SLURM_CLUSTER_NAME"):
        return named
    try:
        text = call(["scontrol", "show", "config"], timeout_s=20.0)
    except FrontierError:
        return None
    found = re.search(r"^ClusterName\s*=\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else None


def is_active(job_id: str, patience_s: float = AT_ONCE_S) -> bool:
    """Return True while the job waits or runs."""
    return job_fields(job_id, patience_s).get("JobState") in ACTIVE


def queue(command: Sequence[str], env: Mapping[str, str], patience_s: float = AT_ONCE_S) -> str:
    """Queue a job with a command of sbatch that ends with the path of the script. Return the job's id.

    The command is repeated for `patience_s` while the controller does not respond. Slurm can have queued the job
    although sbatch received no reply. Before each repetition, another job of this user with the same script is
    therefore looked for, and its id is returned.
    """
    started_s = time.monotonic()
    while True:
        try:
            return call(command, env=env).strip().split(";")[0]
        except ControllerAway as error:
            if time.monotonic() - started_s >= patience_s:
                raise
            log.warn(f"sbatch failed: {error}; trying again for {patience_s / 60:.0f} minutes")
        time.sleep(PAUSE_S)
        if queued := _other_jobs(command[-1], patience_s):
            return queued[0]


def environment_of_next_job(own: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without the variables that describe the job in which it runs.

    sbatch passes its environment to the new job, and Slurm does not replace each of these variables there.
    """
    if "SLURM_JOB_ID" not in own:
        return dict(own)
    kept = {
        name: value
        for name, value in own.items()
        if name in _FOR_COMMANDS or (name not in _OF_ONE_JOB and not name.startswith(("SLURM_", "SLURMD_")))
    }
    if image := own.get(SHARED_CONTAINER):
        kept["FRONTIER_LLM_CONTAINER"] = image
    return kept


def _other_jobs(script: str, patience_s: float) -> list[str]:
    """Return this user's jobs, except this one, that wait or run with this script."""
    lines = ask(["squeue", "--me", "--noheader", "--format=%A|%o"], patience_s).splitlines()
    rows = [line.strip().partition("|") for line in lines]
    return [job_id for job_id, _, command in rows if command == script and job_id != environ("SLURM_JOB_ID")]


def requeue(job_id: str) -> None:
    """Requeue this job. Slurm then ends the batch shell, which is the caller."""
    ask(["scontrol", "requeue", job_id])
