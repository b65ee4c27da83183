"""Approximate orthogonalisation by five steps of a Newton-Schulz iteration (Jordan et al. 2024).

The functions take stacks of matrices that tensor parallelism may split. A step is X <- a X + (b G + c G²) X with
G = X Xᵀ. If tp splits the longer side, G is a sum over tp, the products with X are divided
by tp, and every rank computes G² completely. If tp splits the shorter side, every rank gathers the matrix and iterates
on all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.blueprint.matrices import NEWTON_SCHULZ_STEPS, Part
from frontier_llm.comm import DONE, Axis, all_reduce_, start_all_gather_into, start_all_reduce_
from frontier_llm.ops import statistics_dtype
from frontier_llm.ops.dtypes import product_dtype

# These coefficients map singular values above 1e-3 to 0.7 … 1.2. They have a steep slope at zero, which matters more to
# an optimizer than singular values of exactly 1.
A = 3.4445
B = -4.7750
C = 2.0315
EPSILON = 1e-7


@dataclass
class MatrixStack:
    """Matrices of one shape, [count, short, long] on this rank. `part` describes how tp splits these matrices."""

    x: Tensor
    part: Part


def orthogonalize_(stacks: Sequence[MatrixStack], tp: Axis) -> None:
    """Replace every matrix U·S·Vᵀ by U·S'·Vᵀ with singular values S' near 1.

    Collective over tp. All tp ranks must pass the same stacks.
    """
    own = _gather(stacks, tp)
    _normalize(stacks, tp)
    for _ in range(NEWTON_SCHULZ_STEPS):
        sums = []
        for stack in stacks:  # G of one stack is summed over tp while G of the next is computed
            x = stack.x.to(product_dtype(stack.x.dtype, stack.x.device))
            gram = (x @ x.mT).to(stack.x.dtype)
            pending = start_all_reduce_(gram, tp) if stack.part is Part.LONG else DONE
            sums.append((gram, pending))
        for stack, (gram, pending) in zip(stacks, sums, strict=True):
            pending.wait()
            dtype = product_dtype(stack.x.dtype, stack.x.device)
            x = stack.x.to(dtype)
            gram = gram.to(dtype)
            polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
            stack.x = torch.baddbmm(x, polynomial, x, beta=A).to(stack.x.dtype)
    for stack in own:
        stack.x = stack.x.chunk(tp.size, dim=1)[tp.rank]


def _gather(stacks: Sequence[MatrixStack], tp: Axis) -> list[MatrixStack]:
    """Gather the matrices that tp splits along the shorter side, in one collective, and return their stacks."""
    cut = [stack for stack in stacks if stack.part is Part.SHORT]
    if cut:
        mine = torch.cat([stack.x.flatten() for stack in cut])
        gathered = torch.empty(tp.size * mine.numel(), dtype=mine.dtype, device=mine.device)
        start_all_gather_into(gathered, mine, tp).wait()
        for stack, parts in zip(
            cut,
            gathered.view(tp.size, -1).split([stack.x.numel() for stack in cut], dim=1),
            strict=True,
        ):
            count, short, long = stack.x.shape
            stack.x = parts.reshape(tp.size, count, short, long).transpose(0, 1).reshape(count, tp.size * short, long)
    return cut


def _normalize(stacks: Sequence[MatrixStack], tp: Axis) -> None:
    """Scale each matrix to a Frobenius norm of 1, so that no singular value is above 1.

    One collective sums the squares over tp.
    """
    squares = [
        torch.linalg.vector_norm(stack.x, dim=(1, 2), dtype=statistics_dtype(stack.x.dtype)).square()
        for stack in stacks
    ]
    cut = [square for stack, square in zip(stacks, squares, strict=True) if stack.part is Part.LONG]
    if cut:
        whole = iter(all_reduce_(torch.cat(cut), tp).split([len(square) for square in cut]))
        squares = [
            next(whole) if stack.part is Part.LONG else square for stack, square in zip(stacks, squares, strict=True)
        ]
    for stack, square in zip(stacks, squares, strict=True):
        stack.x = stack.x / (square.sqrt() + EPSILON).to(stack.x.dtype)[:, None, None]
