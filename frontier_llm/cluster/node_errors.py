"""Compares a node's memory errors with its own history, which the run directory keeps in `node_errors.jsonl`.

The driver of an AMD GPU counts corrected and uncorrected errors (ECC) since the node's start. Many healthy nodes have
some corrected errors. A node is faulty if it has new uncorrected errors, or far more corrected errors than it usually
has between two examinations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from frontier_llm.run.records import is_count
from frontier_llm.run.run_dir import append_line, read_jsonl

FILE = "node_errors.jsonl"
MANY = 10  # multiple of the median number of new corrected errors at which a node is faulty
FEWEST_CHANGES = 3  # with fewer intervals in the history, the usual number of new errors is unknown


@dataclass(frozen=True)
class ErrorCounts:
    """Errors of all GPUs of a node since the node's start."""

    corrected: int
    uncorrected: int

    def since(self, before: ErrorCounts) -> ErrorCounts:
        """Return the new errors. A count that is smaller than before began again at the node's restart."""
        if self.corrected < before.corrected or self.uncorrected < before.uncorrected:
            return self
        return ErrorCounts(self.corrected - before.corrected, self.uncorrected - before.uncorrected)


def new_errors(history: Sequence[ErrorCounts], now: ErrorCounts) -> str:
    """Return the reason why a node must not be used, or '' for a node that may be used.

    `history` has the counts of earlier examinations, oldest first.
    """
    if not history:
        return ""
    new = now.since(history[-1])
    if new.uncorrected:
        return f"{new.uncorrected} uncorrected memory errors since the last examination"
    changes = [later.since(earlier).corrected for earlier, later in pairwise(history)]
    if len(changes) < FEWEST_CHANGES:
        return ""
    usual = max(1.0, median(changes))
    if new.corrected < MANY * usual:
        return ""
    return f"{new.corrected} corrected memory errors since the last examination, and usually {median(changes):g}"


def read_history(run_dir: Path) -> dict[str, list[ErrorCounts]]:
    """Return the counts of earlier examinations by host, oldest first. Damaged lines are left out."""
    history: dict[str, list[ErrorCounts]] = {}
    for row in read_jsonl(run_dir / FILE):
        hosts = row.get("hosts")
        for host, counts in hosts.items() if isinstance(hosts, dict) else ():
            if isinstance(counts, list) and len(counts) == 2 and all(map(is_count, counts)):
                history.setdefault(host, []).append(ErrorCounts(*counts))
    return history


def record_counts(run_dir: Path, counts: Mapping[str, ErrorCounts]) -> None:
    """Append the counts of one examination. Hosts whose driver counts no errors are not in `counts`."""
    if counts:
        hosts = {host: [count.corrected, count.uncorrected] for host, count in counts.items()}
        append_line(run_dir / FILE, {"unix_s": time.time(), "hosts": hosts})
