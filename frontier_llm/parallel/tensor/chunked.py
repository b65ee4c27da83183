"""Products and the collectives beside them, cut along the sequence: while one chunk is multiplied, the next is under
way.

Rows of a product do not depend on each other, so gather-then-multiply and multiply-then-scatter (or -reduce) may go
chunk by chunk (Wang et al., ASPLOS 2023, "Overlap Communication with Dependent Computation via Decomposition"). A chunk
takes rows from every rank's part of the sequence; putting rows back in their places costs one copy of the result, about
1/hidden of the product's time. With one chunk nothing is copied: that is the plain collective. Each chunk's sum has the
same order of ranks, so only the product's own rounding may differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from frontier_llm.comm import (
    Axis,
    all_gather,
    all_reduce_,
    reduce_scatter,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter_into,
)

Product = Callable[[Tensor], Tensor]  # (rows, B, k) → (rows, B, o), row by row


def gather_and_multiply(x_sBk: Tensor, multiply: Product, axis: Axis, chunks: int) -> tuple[Tensor, list[Tensor]]:
    """(multiply(all_gather(x)) as (S, B, o), the gathered chunks: see `in_sequence`)."""
    if axis.size == 1 or chunks == 1:
        x_SBk = all_gather(x_sBk, axis)
        return multiply(x_SBk), [x_SBk]
    under_way = [start_all_gather(part, axis) for part in x_sBk.chunk(chunks)]
    y_tsBo = torch.empty(0)
    row = 0
    for gathered, pending in under_way:
        pending.wait()
        product_tcBo = multiply(gathered).unflatten(0, (axis.size, -1))
        if not row:
            y_tsBo = product_tcBo.new_empty((axis.size, x_sBk.shape[0], *product_tcBo.shape[2:]))
        y_tsBo[:, row : row + product_tcBo.shape[1]] = product_tcBo
        row += product_tcBo.shape[1]
    return y_tsBo.flatten(0, 1), [gathered for gathered, _ in under_way]


def in_sequence(gathered: list[Tensor], axis: Axis) -> Tensor:
    """Chunks, each with rows of every rank's part → the whole sequence, (S, …)."""
    if len(gathered) == 1:
        return gathered[0]
    return torch.cat([chunk.unflatten(0, (axis.size, -1)) for chunk in gathered], dim=1).flatten(0, 1)


def multiply_and_scatter(x_SBk: Tensor, multiply: Product, axis: Axis, chunks: int) -> Tensor:
    """reduce_scatter(multiply(x)): this rank's part of the sum over the axis, (s, B, o)."""
    if axis.size == 1 or chunks == 1:
        return reduce_scatter(multiply(x_SBk), axis)
    y_sBo = torch.empty(0)
    row = 0
    under_way = []
    for part_tcBk in x_SBk.unflatten(0, (axis.size, -1)).chunk(chunks, dim=1):
        partial = multiply(part_tcBk.flatten(0, 1))
        if not row:
            y_sBo = partial.new_empty((x_SBk.shape[0] // axis.size, *partial.shape[1:]))
        under_way.append(start_reduce_scatter_into(y_sBo[row : row + part_tcBk.shape[1]], partial, axis))
        row += part_tcBk.shape[1]
    for pending in under_way:
        pending.wait()
    return y_sBo


def multiply_and_reduce(x_SBk: Tensor, multiply: Product, axis: Axis, chunks: int) -> Tensor:
    """all_reduce(multiply(x)): the whole sum over the axis on every rank, (S, B, o)."""
    if axis.size == 1 or chunks == 1:
        return all_reduce_(multiply(x_SBk), axis)
    partials = []
    under_way = []
    for part_cBk in x_SBk.chunk(chunks):
        partials.append(multiply(part_cBk))
        under_way.append(start_all_reduce_(partials[-1], axis))
    for pending in under_way:
        pending.wait()
    return torch.cat(partials)
