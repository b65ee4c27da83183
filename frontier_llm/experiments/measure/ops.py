"""Times each op against other ways to compute the same at a model's shapes; the ways take turns, because a busy machine
moves them all.

A way that fails (a back-end that lacks a shape, no memory) is reported with its error, and the others go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from frontier_llm.config.model import ModelConfig
from frontier_llm.experiments.measure.op_cases import CASES, Shapes
from frontier_llm.experiments.measure.timing import first_line, kernel_s, take_turns
from frontier_llm.ops.reference import Ops


@dataclass(frozen=True)
class Timing:
    """Best time of one op done in one way, forward and backward together where it has both."""

    op: str
    way: str  # "ours", "eager", "compiled", "sdpa-…"
    seconds: float  # nan when it failed
    bytes_moved: int  # what must at least be read and written; 0 for products
    flops: float  # 0 for what is bound by memory
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
    """Every op at the shapes of one microbatch on one rank; `rounds` turns each, the best counts.

    With a `compiler` (torch.compile, say) the only way is the eager one through it, named "compiled".
    """
    shapes = Shapes(model, micro_batch, dtype, torch.device(device))
    for name, build in CASES.items():
        try:
            case = build(ops, shapes)
            ways = case.ways(compiler)
        except (RuntimeError, TypeError) as error:
            yield Timing(name, "all", seconds=math.nan, bytes_moved=0, flops=0.0, error=first_line(error))
            continue
        best, faults = take_turns(ways, rounds, device)
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
    """Bytes read and written per second by a plain copy: the ceiling of the ops that are bound by memory."""
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / min(kernel_s(lambda: target.copy_(source), device) for _ in range(5))
