"""Times the matrix products of the models, forward and both gradients, on all devices of the node at the same time.

The two GCDs of an MI250X share the power of their package, and clocks fall under load. Matrix products on one device
that is busy for a moment are therefore faster than in a training step. `measure` first times one device alone for ten
seconds, then all devices for a minute, and keeps the median of the second half of each.

    products.py SECONDS    # one device: waits for a line on stdin, and prints its times as JSON
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from stages import DEVICE, REHEARSAL, ROOT, model_of

SECONDS = 1.0 if REHEARSAL else 60.0
ALONE_S = 0.5 if REHEARSAL else 10.0
# Calls that are timed together take at least this long, so that the host's launches are hidden behind the device.
SAMPLE_S = 0.005 if REHEARSAL else 0.05
START_LIMIT_S = 60.0
DIRECTIONS = ("forward", "input gradient", "weight gradient")


@dataclass
class Timed:
    """One matrix product of a model: its call, and the samples (seconds since the start, seconds of one call)."""

    label: str
    shape: tuple[int, int, int]  # M, N, K as the planner counts them
    call: Callable[[], object]
    calls: int = 1
    samples: list[tuple[float, float]] = field(default_factory=list)


def products() -> Iterator[Timed]:
    """Yield the matrix products of both models. Each shape is yielded once."""
    from frontier_llm.config.schema import OpsConfig
    from frontier_llm.experiments.measure.op_cases import gemm_shapes, operands, product_calls
    from frontier_llm.ops import select_ops, working_dtype

    dtype = working_dtype("bf16")
    ops = select_ops(OpsConfig(no_jit=True), DEVICE, dtype)
    seen = set()
    for name in ("1b", "3b"):
        model = model_of(name)
        tokens = model.sequence_length * (2 if REHEARSAL else 8)
        for product, M, N, K, _ in gemm_shapes(model, tokens, 1):
            if (M, N, K) in seen:
                continue
            seen.add((M, N, K))
            calls = product_calls(ops, *operands(M, N, K, dtype, torch.device(DEVICE))).values()
            shapes = ((M, N, K), (M, K, N), (N, K, M))
            for direction, shape, (ours, _) in zip(DIRECTIONS, shapes, calls, strict=True):
                yield Timed(f"{name} {product}, {direction}", shape, ours)


def seconds_of(timed: Timed) -> float:
    """Return the mean seconds of `timed.calls` calls that follow each other."""
    if DEVICE == "cpu":
        begin = time.perf_counter()
        for _ in range(timed.calls):
            timed.call()
        return (time.perf_counter() - begin) / timed.calls
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(timed.calls):
        timed.call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / timed.calls


def run_for(limit_s: float) -> list[dict[str, Any]]:
    """Run all products in turn until `limit_s` seconds have passed. Starts when stdin has a line.

    Returns name, shape, the first seconds and the median of the second half for each product.
    """
    with torch.no_grad():
        listed = list(products())
        for timed in listed:
            seconds_of(timed)  # chooses and loads the library's kernel
            timed.calls = max(1, math.ceil(SAMPLE_S / seconds_of(timed)))
        print("ready", flush=True)
        sys.stdin.readline()
        begin = time.monotonic()
        while time.monotonic() - begin < limit_s or not listed[0].samples:
            for timed in listed:
                timed.samples.append((time.monotonic() - begin, seconds_of(timed)))
    return [
        {
            "product": timed.label,
            "mnk": timed.shape,
            "first_s": timed.samples[0][1],
            "seconds": median(seconds for _, seconds in timed.samples[len(timed.samples) // 2 :]),
        }
        for timed in listed
    ]


def _on_devices(count: int, limit_s: float) -> list[list[dict[str, Any]]]:
    """Run `run_for` on the first `count` devices, each in a process of its own. All start together."""
    workers = []
    for device in range(count):
        environment = {**os.environ, "FIRST_GPU_INDEX": str(device)}
        command = [sys.executable, str(Path(__file__)), str(limit_s)]
        workers.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
    results = []
    try:
        for worker in workers:
            assert worker.stdout is not None
            if worker.stdout.readline().strip() != "ready":
                raise RuntimeError(f"a process of the products ended with exit code {worker.wait(START_LIMIT_S)}")
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            text, _ = worker.communicate(timeout=limit_s + START_LIMIT_S)
            results.append(json.loads(text))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return results


def measure() -> dict[str, Any]:
    """Return the time of every matrix product on the slowest device, while all devices are busy."""
    count = 2 if REHEARSAL else torch.cuda.device_count()
    alone = _on_devices(1, ALONE_S)[0]
    together = _on_devices(count, SECONDS)
    rows = []
    for single, several in zip(alone, zip(*together, strict=True), strict=True):
        times = [one["seconds"] for one in several]
        rows.append({**several[0], "seconds": max(times), "fastest_device_s": min(times), "alone_s": single["seconds"]})
    ratios = [math.log(row["seconds"] / row["alone_s"]) for row in rows]
    return {
        "devices": count,
        "measured_for_s": SECONDS,
        "together_over_alone": math.exp(sum(ratios) / len(ratios)),
        "products": rows,
    }


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["FIRST_GPU_INDEX"]))
    print(json.dumps(run_for(float(sys.argv[1]))))
