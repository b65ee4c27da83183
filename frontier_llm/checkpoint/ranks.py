"""Sends results of rank 0, and errors of any rank, to all ranks. All ranks return the same result or raise the same
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple
from typing import Any

import torch

from frontier_llm.checkpoint.directory import CannotWrite
from frontier_llm.checkpoint.lock import Superseded
from frontier_llm.checkpoint.manifest import DamagedCheckpoint
from frontier_llm.checkpoint.remote import NotCopied, RemoteTransfer
from frontier_llm.comm import Axis, all_gather_json, broadcast_json
from frontier_llm.data.remote import UnreachableError
from frontier_llm.errors import CheckpointError, FrontierError, Problem

MOST_PROBLEMS = 10  # largest number of problems that one rank sends to all ranks


def from_rank_0(compute: Callable[[], Any], world: Axis, device: torch.device) -> Any:
    """Call `compute` on rank 0 only. Every rank returns its JSON value or raises its error. Collective.

    An unexpected error is raised unchanged on rank 0, so that its traceback is kept.
    """
    value = None
    error: Exception | None = None
    if world.rank == 0:
        try:
            value = compute()
        except Exception as caught:
            error = caught
    value, failure = broadcast_json([value, encoded(error)], world, device)
    if error is not None and not isinstance(error, FrontierError | OSError):
        raise error
    if failure is not None:
        raise joined([failure])
    return value


def transferred(
    start: Callable[[], RemoteTransfer],
    if_not_possible: Callable[[FrontierError], Any],
    on_wait: Callable[[], object],
    world: Axis,
    device: torch.device,
) -> Any:
    """Run a transfer on rank 0, which may take longer than the time limit of a collective. Collective.

    Every rank calls `on_wait` several times per second. Every rank returns the JSON value of the transfer, or the value
    of `if_not_possible` if the store cannot be reached or the disk is full. Every rank raises any other error.
    """
    transfer = start() if world.rank == 0 else None

    def result() -> Any:
        assert transfer is not None
        try:
            return transfer.result()
        except (UnreachableError, CannotWrite) as error:
            return if_not_possible(error)

    while not from_rank_0(lambda: transfer is not None and transfer.is_over(), world, device):
        on_wait()
    return from_rank_0(result, world, device)


def joint_error(error: BaseException | None, world: Axis, device: torch.device) -> CheckpointError | None:
    """Return one error with the problems of all ranks, or None if no rank has an error. Collective."""
    failures = [failure for failure in all_gather_json(encoded(error), world, device) if failure is not None]
    return joined(failures) if failures else None


def encoded(error: BaseException | None) -> dict[str, Any] | None:
    """Return an error as JSON: its kind and its first problems."""
    if error is None:
        return None
    if isinstance(error, FrontierError):
        problems = error.problems
    elif isinstance(error, OSError):
        problems = (Problem(str(error.filename or "checkpoint"), str(error.strerror)),)
    else:
        problems = (Problem("checkpoint", f"{type(error).__name__}: {error}"),)
    return {"kind": type(error).__name__, "problems": [astuple(problem) for problem in problems[:MOST_PROBLEMS]]}


def joined(failures: Iterable[dict[str, Any]]) -> CheckpointError:
    """Return one error for several encoded errors, without repeated problems.

    The error is Superseded or NotCopied if any of the errors is, and DamagedCheckpoint if all errors are.
    """
    kinds = {failure["kind"] for failure in failures}
    problems = dict.fromkeys(Problem(*problem) for failure in failures for problem in failure["problems"])
    if Superseded.__name__ in kinds:
        return Superseded(problems)
    if NotCopied.__name__ in kinds:
        return NotCopied(problems)
    if kinds == {DamagedCheckpoint.__name__}:
        return DamagedCheckpoint(problems)
    return CheckpointError(problems)
