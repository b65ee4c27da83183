"""Ends a start whose memory is too tight. The supervisor then starts the job's roomier plan, which needs less memory.

If the device has no free memory for a request, torch's allocator synchronises, frees its cached blocks and tries again
(`num_alloc_retries`). The steps of a phase allocate the same tensors, so an allocator whose cache holds the tensors of
a step needs no further retries. A few retries are normal in the first steps, evaluations and saves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from frontier_llm import log
from frontier_llm.comm import Axis, all_gather_json, barrier, maximum
from frontier_llm.errors import OUT_OF_MEMORY, FrontierError
from frontier_llm.run.failure import Evidence, Failure, write_failure
from frontier_llm.run.job import ROOMIER_PLAN_VARIABLE
from frontier_llm.run.rank_env import environ, node_name

# One retry per step means that no step fits into memory: each step flushes the cache at least once. A count over ten
# steps distinguishes this from the retries of one evaluation or save.
RETRIES_PER_STEP = 1.0
WINDOW_STEPS = 10


class TightMemory(FrontierError):
    """The allocator of a rank retries too often. All ranks raise it after the same step."""

    exit_code = 1
    cause = OUT_OF_MEMORY


@dataclass(frozen=True)
class Tight:
    """The rank with the most retries in a window in which the retries exceeded the limit."""

    retries: int
    rank: int
    host: str
    step: int

    def as_failure(self) -> Failure:
        """Return the failure record that makes the supervisor switch to the roomier plan."""
        what = (
            f"device memory is too tight: torch's allocator freed its cache and tried again {self.retries} times in "
            f"{WINDOW_STEPS} steps, and the limit is {RETRIES_PER_STEP:g} per step"
        )
        return Failure(
            what, Evidence.EXCEPTION, OUT_OF_MEMORY, rank=self.rank, host=self.host, step=self.step, section="train"
        )


def device_retries(device: torch.device) -> Callable[[], int] | None:
    """Return the counter of retries of this rank's allocator. None on a CPU."""
    if device.type != "cuda":
        return None
    return lambda: int(torch.cuda.memory_stats(device)["num_alloc_retries"])


class RetryWatch:
    """Compares the retries of all ranks with the limit, once per window, if the job has a roomier plan."""

    def __init__(self, world: Axis, device: torch.device, count: Callable[[], int] | None) -> None:
        """`count` returns this rank's retries since its start. If it is None on all ranks, retries are not watched."""
        self._world = world
        self._device = device
        self._count = count if environ(ROOMIER_PLAN_VARIABLE) else None
        self._before = 0 if self._count is None else self._count()
        self._steps = 0

    def after_step(self, step: int) -> Tight | None:
        """Return the rank whose retries exceed the limit, after `step` steps of the run.

        In the last step of a window this call is collective over the world. All ranks return the same result.
        """
        self._steps += 1
        if self._count is None or self._steps % WINDOW_STEPS:
            return None
        now = self._count()
        own = now - self._before
        self._before = now
        (most,) = maximum([own], self._world, self._device)
        if most < RETRIES_PER_STEP * WINDOW_STEPS:
            return None
        rows = all_gather_json([own, node_name()], self._world, self._device)
        rank = next(rank for rank, (retries, _) in enumerate(rows) if retries == most)
        return Tight(retries=most, rank=rank, host=rows[rank][1], step=step)

    def end(self, tight: Tight, run_dir: Path) -> None:
        """Write the failure record on rank 0, and raise TightMemory on every rank. Collective over the world."""
        failure = tight.as_failure()
        if self._world.rank == 0:
            write_failure(run_dir, failure)
            log.warn(failure.describe())
        barrier(self._world)  # no rank exits before the record is written
        raise TightMemory(failure.describe(), "the job continues with its roomier plan (submit --fallback-plan)")
