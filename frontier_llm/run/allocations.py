"""Reads and writes `allocations.jsonl` in the run directory: the nodes that Slurm has charged to the run, and for how
long.

Slurm charges all nodes of an allocation, spares included, from its start to its end. Each line therefore describes an
allocation and not a start of the ranks. The supervisor (`cluster.supervisor`) appends a line at its start and before
each decision. Only the newest line of an allocation is valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frontier_llm.run import run_dir
from frontier_llm.run.records import is_count, is_number

FILE = "allocations.jsonl"


@dataclass(frozen=True)
class Allocated:
    """One allocation of a job. A job that Slurm requeues gets a new allocation each time."""

    job_id: str
    restarts: int  # number of times that Slurm had requeued the job
    nodes: int  # number of nodes, spares included
    started_unix_s: float
    seen_unix_s: float  # time until which the allocation is known to have existed

    @property
    def node_hours(self) -> float:
        """Node-hours until `seen_unix_s`."""
        return self.nodes * max(0.0, self.seen_unix_s - self.started_unix_s) / 3600


def is_allocated(row: Mapping[str, Any]) -> bool:
    """Return True if a row of allocations.jsonl has the types that this program writes."""
    is_text = isinstance(row.get("job_id"), str)
    has_counts = is_count(row.get("restarts")) and is_count(row.get("nodes"))
    return is_text and has_counts and is_number(row.get("started_unix_s")) and is_number(row.get("seen_unix_s"))


def record(directory: Path, allocated: Allocated) -> None:
    """Append a line about an allocation to allocations.jsonl."""
    run_dir.append_line(directory / FILE, asdict(allocated))


def allocations(directory: Path) -> list[Allocated]:
    """Return the newest line of each allocation, oldest allocation first."""
    newest: dict[tuple[str, int], Allocated] = {}
    for row in run_dir.read_jsonl(directory / FILE):
        if is_allocated(row):
            known = {name: row[name] for name in Allocated.__dataclass_fields__}
            newest[row["job_id"], row["restarts"]] = Allocated(**known)
    return list(newest.values())


def extend_last(directory: Path) -> None:
    """Move the end of the newest allocation to the time of the newest line in metrics.jsonl, if that is later.

    If the batch host dies while the ranks train, the supervisor cannot append a later line.
    """
    known = allocations(directory)
    if not known:
        return
    last = known[-1]
    times = [row["time"] for row in run_dir.read_jsonl(directory / "metrics.jsonl") if is_number(row.get("time"))]
    newest_unix_s = max(times, default=0.0)
    if newest_unix_s > last.seen_unix_s:
        values = {**asdict(last), "seen_unix_s": newest_unix_s}
        record(directory, Allocated(**values))


def node_hours(directory: Path, billed: Mapping[str, float]) -> float:
    """Return the node-hours of all jobs of the run.

    `billed` maps job ids to node-hours in Slurm's accounting. For each job the larger of the two values counts. Slurm's
    accounting can lack old jobs, and allocations.jsonl can lack the time before a batch host died. Jobs without a line
    in allocations.jsonl come from older versions or other programs. Their node-hours are computed from the nodes and
    times of their ranks.
    """
    recorded: dict[str, float] = {}
    for allocated in allocations(directory):
        recorded[allocated.job_id] = recorded.get(allocated.job_id, 0.0) + allocated.node_hours
    jobs = sum(max(hours, billed.get(job_id, 0.0)) for job_id, hours in recorded.items())
    others = sum(attempt.node_hours for attempt in run_dir.attempts(directory) if attempt.job_id not in recorded)
    return jobs + others
