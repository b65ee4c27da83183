"""Benchmark of comm.tensor_chunks: how much tensor-parallel communication splitting hides.

The option splits a matrix product and its collective into pieces, so that the collective of one piece overlaps with the
product of another piece. The measurement uses the sizes of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from frontier_llm.blueprint.items import Collective, Phase, Product, Software
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.work import block_work
from frontier_llm.comm.axis import Axis, Mesh, all_gather, all_reduce_, reduce_scatter
from frontier_llm.config import ModelConfig
from frontier_llm.experiments.measure.links import slowest_s
from frontier_llm.ops import working_dtype
from frontier_llm.parallel.tensor.linear import gather_and_multiply, multiply_and_reduce, multiply_and_scatter

PIECES = (2, 4)
BUDGET_S = 0.1  # seconds for all repetitions of one measurement


@dataclass(frozen=True)
class PiecesTime:
    """Times of a matrix product and its collective: of single pieces, and of all pieces together as in a step."""

    operation: str
    pieces: int
    product_s: float  # seconds of the product of one piece
    collective_s: float  # seconds of the collective of one piece
    copy_s: float  # seconds for copying all rows into their final order
    together_s: float  # seconds of all pieces together, with their overlap

    @property
    def overlap(self) -> float:
        """Hidden fraction of a piece's matrix product or of its collective, whichever is shorter: 0 (nothing is hidden)
        to 1.
        """
        hidden_s = self.pieces * (self.product_s + self.collective_s) + self.copy_s - self.together_s
        return min(max(hidden_s / ((self.pieces - 1) * min(self.product_s, self.collective_s)), 0.0), 1.0)

    def as_json(self) -> dict[str, Any]:
        """Return the fields and the overlap."""
        return {**asdict(self), "overlap": self.overlap}


def bench_pieces(mesh: Mesh, model: ModelConfig, layout: Layout, device: torch.device) -> list[PiecesTime]:
    """Measure each forward product of a block that can overlap with a collective, split into each count of `PIECES`.

    Collective over the world. Returns an empty list without tensor parallelism.
    """
    pairs = {
        (item.work.operation, item.work.beside)
        for item in block_work(model, layout, Software())
        if item.phase is Phase.F and isinstance(item.work, Collective) and item.work.beside
    }
    return [
        _measured(mesh, layout, operation, product, pieces, device)
        for operation, product in sorted(pairs, key=repr)
        for pieces in PIECES
        if product.m // layout.micro_batch // layout.sequence_shards % pieces == 0
    ]


def chunk_overlap(measured: Sequence[PiecesTime]) -> float:
    """Return the value of `chunk_overlap` in a machine file: the median of the measured overlaps."""
    return median(one.overlap for one in measured)


def _measured(
    mesh: Mesh, layout: Layout, operation: str, product: Product, pieces: int, device: torch.device
) -> PiecesTime:
    calls = _calls(
        operation=operation,
        product=product,
        B=layout.micro_batch,
        pieces=pieces,
        axis=mesh.tp,
        dtype=working_dtype(layout.dtype),
        device=device,
    )
    seconds = [slowest_s(call, mesh.world, device, BUDGET_S) for call in calls]
    return PiecesTime(operation, pieces, *seconds)


def _calls(
    operation: str, product: Product, B: int, pieces: int, axis: Axis, dtype: torch.dtype, device: torch.device
) -> Iterator[Callable[[], object]]:
    """Yield four calls: product of one piece, collective of one piece, copy of all rows, everything in pieces."""
    S = product.m // B
    rows = product.m // B // pieces

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    w_ok = zeros(product.n, product.k)

    def multiply(x: Tensor) -> Tensor:
        return x @ w_ok.T

    piece_cBk = zeros(rows, B, product.k)
    piece_cBo = zeros(rows, B, product.n)
    yield lambda: multiply(piece_cBk)
    if operation == "all_gather":
        part = zeros(rows // axis.size, B, product.k)
        x_sBk = zeros(S // axis.size, B, product.k)
        y_SBo = zeros(S, B, product.n)
        yield from (
            lambda: all_gather(part, axis),
            y_SBo.clone,
            lambda: gather_and_multiply(x_sBk, multiply, axis, pieces),
        )
    elif operation == "reduce_scatter":
        x_SBk = zeros(S, B, product.k)
        yield from (
            lambda: reduce_scatter(piece_cBo, axis),
            x_SBk.clone,
            lambda: multiply_and_scatter(x_SBk, multiply, axis, pieces),
        )
    else:
        x_SBk = zeros(S, B, product.k)
        y_SBo = zeros(S, B, product.n)
        yield from (
            lambda: all_reduce_(piece_cBo, axis),
            y_SBo.clone,
            lambda: multiply_and_reduce(x_SBk, multiply, axis, pieces),
        )
