"""Checks, before the first collective, that all ranks have equal devices, torch builds, kernels and C++ libraries.

Every rank writes one report of a few hundred bytes to the rendezvous store. Rank 0 reads all reports by one request,
and writes its verdict to the store. A rank that cannot use its device reports the error in the same way. All ranks then
exit within seconds and name this error as the cause.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from frontier_llm import log
from frontier_llm.errors import REFUSED_CAUSE, FrontierError, Problem, RankFailure
from frontier_llm.run import hostlist
from frontier_llm.run.failure import Evidence, Failure
from frontier_llm.units import plural, strict_json

AGREED = "agreed"
# Longest time that rank 0 waits before it exits, so that the other ranks can read the verdict. Rank 0's process may
# serve the store.
LINGER_S = 3.0
POLL_S = 0.02
_VERDICT = "start/verdict"
_READ = "start/read"


@dataclass(frozen=True)
class RankReport:
    """Facts about device and software that one rank has found on its host."""

    host: str
    facts: dict[str, str]  # name → value; the values must be equal on all ranks
    error: str = ""  # why the rank cannot use its device; '' if it can
    fix: str = ""  # how to repair the error

    @classmethod
    def of(cls, host: str, facts: dict[str, str], error: FrontierError | None) -> RankReport:
        """Return the report of a rank. `error` is None if the rank can use its device."""
        if error is None:
            return cls(host, facts)
        if len(error.problems) > 1:
            return cls(host, facts, str(error))
        (problem,) = error.problems
        return cls(host, facts, str(replace(problem, fix="")), problem.fix)

    def to_json(self) -> str:
        """Return the JSON text that is written to the store."""
        return strict_json(asdict(self), indent=None)


def agree(
    store: dist.Store,
    rank: int,
    world_size: int,
    report: RankReport,
    record: Callable[[Failure], None],
    timeout_s: float,
) -> None:
    """Compare the reports of all ranks. Returns normally if all ranks have reported the same facts and no error.

    Otherwise every rank raises: RankFailure for a fault of some nodes or missing ranks, FrontierError for a refusal.
    Rank 0 calls `record` with the failure first. Raises RuntimeError if no verdict is in the store after `timeout_s`.
    """
    store.set(_report_key(rank), report.to_json())
    if rank == 0:
        failure = _collect(store, world_size, timeout_s)
        if failure is not None:
            record(failure)
        store.set(_VERDICT, AGREED if failure is None else failure.to_json())
    # rank 0 waits `timeout_s` for the reports, so the others wait LINGER_S longer for its verdict
    store.wait([_VERDICT], timedelta(seconds=timeout_s + LINGER_S))
    verdict = store.get(_VERDICT).decode()
    if verdict == AGREED:
        facts = ", ".join(f"{name} {value}" for name, value in report.facts.items())
        log.info(f"all {plural(world_size, 'rank')} agree: {facts}")
        return
    if rank == 0:
        _await_readers(store, world_size - 1)
    else:
        store.add(_READ, 1)
    raise_failure(Failure.from_json(verdict))


def raise_failure(failure: Failure) -> NoReturn:
    """Raise the failure as the error that the user reads.

    A refusal is a FrontierError (exit code 2, no retry). Other failures are a RankFailure.
    """
    if failure.cause == REFUSED_CAUSE:
        raise FrontierError(failure.what, failure.fix)
    raise RankFailure(failure.what, failure.fix)


def judge(reports: Sequence[RankReport]) -> Failure | None:
    """Compare the reports of all ranks, in rank order. Returns None if all reports have equal facts and no error.

    The expected facts are the facts of most hosts. Only hosts whose ranks all report the same facts are counted. In a
    tie, the facts of the lower rank are expected. If fewer than half of the hosts differ, the failure is a fault of
    these nodes, and `excluded_hosts` names them. Otherwise the failure is a refusal.

    Different numbers of ranks on the hosts are a refusal, too.
    """
    by_host: dict[str, list[RankReport]] = {}
    for report in reports:
        by_host.setdefault(report.host, []).append(report)
    sizes = Counter(len(own) for own in by_host.values())
    if len(sizes) > 1:
        return _uneven(reports, by_host, usual=max(sizes, key=sizes.__getitem__))
    uniform = [own[0] for own in by_host.values() if all(_identity(report) == _identity(own[0]) for report in own)]
    counts = Counter(_identity(report) for report in uniform)
    expected = max(counts, key=counts.__getitem__) if counts else _identity(reports[0])
    normal = next(report for report in reports if _identity(report) == expected)
    differing = [host for host, own in by_host.items() if any(_identity(report) != expected for report in own)]
    if not differing and not normal.error:
        return None
    is_node_fault = 2 * len(differing) < len(by_host) and not normal.error
    failed = [rank for rank, report in enumerate(reports) if report.error]
    other = [rank for rank, report in enumerate(reports) if _identity(report) != expected]
    first = (failed or other)[0]
    told = reports[first]
    affected = {reports[rank].host for rank in failed} if normal.error else differing
    problem = _explain(first, told, normal)
    if len(affected) > 1:
        hosts = f"{len(affected)} of {len(by_host)} hosts: {hostlist.compress(affected)}"
        problem = replace(problem, what=f"{problem.what} (the same problem on {hosts})")
    return Failure(
        problem.what,
        Evidence.EXCEPTION if told.error else Evidence.COMPARISON,
        fix=problem.fix,
        cause="node failure" if is_node_fault else REFUSED_CAUSE,
        rank=first,
        host=told.host,
        section="start",
        host_suspect=is_node_fault,
        message=tuple(str(problem).splitlines()),
        excluded_hosts=tuple(differing) if is_node_fault else (),
    )


def _uneven(reports: Sequence[RankReport], by_host: Mapping[str, Sequence[RankReport]], usual: int) -> Failure:
    """Return the refusal of hosts with different numbers of ranks.

    Each rank derives the ranks of all nodes from the number of ranks on its own node.
    """
    host = next(host for host, own in by_host.items() if len(own) != usual)
    what = f"the nodes have different numbers of ranks: {len(by_host[host])} on {host}, and {usual} on most nodes"
    problem = Problem("", what, "start the same number of ranks on each node (srun --ntasks-per-node)")
    return Failure(
        what,
        Evidence.COMPARISON,
        fix=problem.fix,
        cause=REFUSED_CAUSE,
        rank=next(rank for rank, report in enumerate(reports) if report.host == host),
        host=host,
        section="start",
        message=tuple(str(problem).splitlines()),
    )


def _identity(report: RankReport) -> tuple[tuple[tuple[str, str], ...], bool]:
    return tuple(sorted(report.facts.items())), bool(report.error)


def _explain(rank: int, told: RankReport, normal: RankReport) -> Problem:
    """Return the problem of a rank that reports an error, or facts that differ from the facts of `normal`."""
    if told.error:
        return Problem("", told.error, told.fix)
    differences = [
        f"{name} is {value} instead of {normal.facts.get(name)}"
        for name, value in told.facts.items()
        if normal.facts.get(name) != value
    ]
    fix = "give every node the same Python environment, prebuilt kernels and GPUs, or exclude the node"
    if told.facts.get("precision") != normal.facts.get("precision"):  # precision.dtype=auto on different CPUs
        fix = "set precision.dtype=bf16 or precision.dtype=fp32, which every CPU computes, or exclude the node"
    return Problem("", f"rank {rank} on {told.host} differs from most ranks: {'; '.join(differences)}", fix)


def _collect(store: dist.Store, world_size: int, timeout_s: float) -> Failure | None:
    """Read the reports of all ranks on rank 0, and return the result of `judge`.

    If some ranks have not reported within `timeout_s`, return a failure that names these ranks.
    """
    keys = [_report_key(rank) for rank in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        what = (
            f"{len(missing)} of {world_size} ranks did not start within {timeout_s:g} s: "
            f"{hostlist.compress(map(str, missing))}"
        )
        problem = Problem("", what, "read the logs of these ranks; raise train.timeout_s if they are only slow")
        return Failure(
            what,
            Evidence.NOTICES,
            fix=problem.fix,
            rank=missing[0],
            section="start",
            message=tuple(str(problem).splitlines()),
        )
    return judge([RankReport(**json.loads(text)) for text in store.multi_get(keys)])


def _await_readers(store: dist.Store, count: int) -> None:
    """Wait until the other ranks have read the verdict, for at most LINGER_S."""
    deadline_s = time.monotonic() + LINGER_S
    while store.add(_READ, 0) < count and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def _report_key(rank: int) -> str:
    return f"start/report/{rank}"
