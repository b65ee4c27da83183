"""Named ranges for a GPU profiler: NVTX for NVIDIA's tools, and roctx for AMD's.

Ranges exist only if a profiler reads them. Without a profiler, `new_ledger` returns the plain `Ledger`, and `in_ranges`
returns the given functions, so that a step executes no additional instruction (tests/unit/comm/test_ranges.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from frontier_llm.comm.ledger import Call, Ledger
from frontier_llm.run.rank_env import environ
from frontier_llm.schedule import Action, Kind

# Environment variables that profilers set in the processes that they start.
LISTENERS = {
    "NSYS_PROFILING_SESSION_ID": "nsys",
    "NVTX_INJECTION64_PATH": "a tool that reads NVTX",
    "ROCPROF_MARKER_API_TRACE": "rocprofv3 --marker-trace",
}
_OFF = ("", "0", "false", "off", "no")


def listener() -> str:
    """Return the name of the profiler that reads this process's ranges, or '' without one."""
    for variable, name in LISTENERS.items():
        if (environ(variable) or "").lower() not in _OFF:
            return name
    return ""


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Give the body a name in the profiler's timeline. torch calls roctx if it was built for ROCm."""
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


class RangedLedger(Ledger):
    """A ledger that also opens a range for the start of each call and for the wait for it."""

    @contextmanager
    def blocked(self, call: Call, last: bool = True) -> Iterator[None]:
        """Record blocked time as `Ledger.blocked`, in a range such as 'dp reduce_scatter 17, 4194304 bytes'."""
        with (
            named_range(f"{'wait for ' if last else ''}{call.axis} {call.operation} {call.number}, {call.bytes} bytes"),
            super().blocked(call, last),
        ):
            yield


def new_ledger() -> Ledger:
    """Return the ledger of a rank, with ranges if a profiler listens."""
    return RangedLedger() if listener() else Ledger()


def label(action: Action) -> str:
    """Return an action's name in a timeline: 'forward of microbatch 3, virtual stage 0'."""
    kind = action.kind.name.lower().replace("_", " ")
    return f"{kind} of microbatch {action.microbatch}, virtual stage {action.position}"


Runs = dict[Kind, Callable[[Action], None]]


def in_ranges(runs: Runs) -> Runs:
    """Return the functions that run actions by kind, each in a range with the action's label if a profiler listens."""
    return {kind: _in_range(run) for kind, run in runs.items()} if listener() else runs


def _in_range(run: Callable[[Action], None]) -> Callable[[Action], None]:
    def call(action: Action) -> None:
        with named_range(label(action)):
            run(action)

    return call
