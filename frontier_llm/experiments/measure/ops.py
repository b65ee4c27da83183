"""Benchmark of single ops: this project's implementation against torch's, at the shapes of a model.

Each round calls every implementation once, so that other load on the machine slows all of them equally. If an
implementation fails (unsupported shape, no memory), its error is reported and the others continue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from frontier_llm.config.model import ModelConfig
from frontier_llm.experiments.measure.op_cases import CASES, Shapes
from frontier_llm.experiments.measure.timing import first_line, interleave, kernel_s
from frontier_llm.ops.reference import Ops


@dataclass(frozen=True)
class Timing:
    """Best time of one implementation of an op, forward and backward together if the op has both."""

    op: str
    way: str  # "ours", "eager", "compiled", "sdpa-…"
    seconds: float  # nan if the measurement failed
    bytes_moved: int  # least memory traffic of the op; 0 for matrix products
    flops: float  # 0 for memory-bound ops
    error: str = ""


def compare(
    ops: Ops,
    model: ModelConfig,
    micro_batch: int,
    dtype: torch.dtype,
    device: str,
    rounds: int = 7,
    compiler: Callable[..., Any] | None = None,
) -> Iterator[Timing]:
    """Yield the times of every op at the shapes of one microbatch on one rank: the best of `rounds` calls.

    With a `compiler` (for example torch.compile), only eager torch compiled by it is timed, with the name "compiled".
    """
    shapes = Shapes(model, micro_batch, dtype, torch.device(device))
    for name, build in CASES.items():
        try:
            case = build(ops, shapes)
            ways = case.ways(compiler)
        except (RuntimeError, TypeError) as error:
            yield Timing(name, "all", seconds=math.nan, bytes_moved=0, flops=0.0, error=first_line(error))
            continue
        best, faults = interleave(ways, rounds, device)
        for way in ways:
            yield Timing(
                op=name,
                way=way,
                seconds=best.get(way, math.nan),
                bytes_moved=case.bytes_moved,
                flops=case.flops,
                error=faults.get(way, ""),
            )


def copy_bandwidth(device: str, size_bytes: int = 256 * 2**20) -> float:
    """Return the bytes per second that a plain copy reads and writes: the upper limit for memory-bound ops."""
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / min(kernel_s(lambda: target.copy_(source), device) for _ in range(5))
