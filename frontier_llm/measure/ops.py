"""Times each op against other ways to compute the same at a model's shapes; the ways take turns, because a busy machine moves them all.

A way that fails (a back-end that lacks a shape, no memory) is reported with its error, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from frontier_llm.config.model import ModelConfig
from frontier_llm.measure.op_cases import CASES, Case, Run, Shapes
from frontier_llm.measure.timing import kernel_s
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
            yield Timing(name, "all", float("nan"), 0, 0.0, _first_line(error))
        else:
            yield from _take_turns(name, case, ways, rounds, device)


def _take_turns(name: str, case: Case, ways: Mapping[str, Run], rounds: int, device: str) -> list[Timing]:
    best, failed = dict.fromkeys(ways, float("inf")), {}
    for turn in range(rounds + 1):
        for way, run in ways.items():
            if way in failed:
                continue
            try:
                seconds = kernel_s(run, device)
            except Exception as error:
                failed[way] = _first_line(error)
                best[way] = float("nan")
            else:
                best[way] = min(best[way], seconds) if turn else best[way]  # the first turn warms up
    return [Timing(name, way, best[way], case.bytes_moved, case.flops, failed.get(way, "")) for way in ways]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def copy_bandwidth(device: str, size_bytes: int = 256 * 2**20) -> float:
    """Bytes read and written per second by a plain copy: the ceiling of the ops that are bound by memory."""
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / min(kernel_s(lambda: target.copy_(source), device) for _ in range(5))


def gemm_rate(device: str, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of torch's product of two square matrices of random numbers: the ceiling of the products."""
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / min(kernel_s(lambda: left @ right, device) for _ in range(5))
