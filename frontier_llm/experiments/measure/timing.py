"""How long a call takes: the clocks of all benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

_CALLS_ON_GPU = 10
_HEAD_START_CYCLES = 30_000_000  # about 15 ms


def wall_s(run: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of one call; a GPU is waited for before and after it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def cpu_s(run: Callable[[], object]) -> float:
    """Seconds of this process's CPU time, all its threads together."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def kernel_s(run: Callable[[], object], device: str) -> float:
    """Wall seconds of one call; on a GPU the mean of ten that are queued together, by the GPU's own clock.

    The GPU idles first, while the host queues them all: Python takes longer to launch a small op than the GPU to do it.
    """
    if device != "cuda":
        return wall_s(run, torch.device("cpu"))
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call, unused-ignore]
    begin_event.record()
    for _ in range(_CALLS_ON_GPU):
        run()
    end_event.record()
    torch.cuda.synchronize()
    return begin_event.elapsed_time(end_event) / 1e3 / _CALLS_ON_GPU


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str,
) -> tuple[dict[str, float], dict[str, str]]:
    """(best seconds of each, what those that failed ran into): one call of each in every round, because a busy
    machine moves them all.
    """
    best = dict.fromkeys(runs, float("inf"))
    faults = dict[str, str]()
    for turn in range(rounds + 1):
        for name in (name for name in runs if name not in faults):
            try:
                seconds = kernel_s(runs[name], device)
            except Exception as error:
                faults[name] = first_line(error)
            else:
                best[name] = min(best[name], seconds) if turn else best[name]  # the first turn warms up
    return {name: seconds for name, seconds in best.items() if name not in faults}, faults


def first_line(error: Exception) -> str:
    """'RuntimeError: no viable back-end'."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def median_s(
    run: Callable[[], object],
    repeats: int,
    clock: Callable[[Callable[[], object]], float],
    before: Callable[[], object] = lambda: None,
) -> float:
    """Median of `repeats` readings of `clock` after one call to warm up; `before`, e.g. a barrier, is not timed."""
    before()
    run()
    seconds = []
    for _ in range(repeats):
        before()
        seconds.append(clock(run))
    return median(seconds)
