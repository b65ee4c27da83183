"""Timing functions that all benchmarks use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

_CALLS_ON_GPU = 10
_HEAD_START_CYCLES = 30_000_000  # cycles for which the GPU idles while the host queues kernels, about 15 ms


def wall_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the wall seconds of one call. A GPU is synchronised before and after it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def cpu_s(run: Callable[[], object]) -> float:
    """Return the CPU seconds that this process, with all its threads, uses for one call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def kernel_s(run: Callable[[], object], device: str) -> float:
    """Return the wall seconds of one call. On a GPU, return the mean of ten queued calls by the GPU's own clock.

    The GPU idles until the host has queued all calls. Otherwise launches would be timed, because Python needs longer to
    launch a small op than the GPU needs to run it.
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


def interleave(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str,
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the best seconds of each run, and the errors of the runs that failed.

    Each round calls every run once, so that other load on the machine slows all of them equally.
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
                best[name] = min(best[name], seconds) if turn else best[name]  # the first round is a warm-up, not timed
    return {name: seconds for name, seconds in best.items() if name not in faults}, faults


def first_line(error: Exception) -> str:
    """Return text such as 'RuntimeError: no viable back-end'."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def median_s(
    run: Callable[[], object],
    repeats: int,
    clock: Callable[[Callable[[], object]], float],
    before: Callable[[], object] = lambda: None,
) -> float:
    """Return the median of `repeats` readings of `clock` after one warm-up call.

    `before` runs before each call and is not timed (for example a barrier).
    """
    before()
    run()
    seconds = []
    for _ in range(repeats):
        before()
        seconds.append(clock(run))
    return median(seconds)
