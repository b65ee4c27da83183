"""Adafactor's factored second moment (Shazeer & Stern 2018, arXiv:1804.04235) for matrices; AdamW for all other
parameters.

Momentum, bias correction and weight decay are the same as in AdamW. A prime (') marks a value after bias correction:

    R <- beta2 R + (1 - beta2) mean of G² over columns, C the same over rows,   V = R Cᵀ / mean of R

    W <- W - lr (M' / (sqrt(V') + eps) + decay W),   M <- beta1 M + (1 - beta1) G

An update is as large as AdamW's, so the same learning rate applies. The paper's relative step sizes and update clipping
are left out, because a run has a tuned learning rate and gradient clipping instead. The matrices q, k, v, gate and up,
and each expert's matrices, have separate means.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from frontier_llm.blueprint.matrices import matrices_of
from frontier_llm.blueprint.optimizers import ADAFACTOR
from frontier_llm.blueprint.parameters import ParameterKind
from frontier_llm.config import OptimizerConfig
from frontier_llm.ops import Ops
from frontier_llm.optim.buckets import OwnedRange
from frontier_llm.optim.elementwise import AdamW
from frontier_llm.optim.matrices import Statistics
from frontier_llm.optim.registry import Slice, register


class Adafactor:
    """Update by AdamW with factored second moments (implements `SliceUpdate`)."""

    def __init__(self, config: OptimizerConfig, ops: Ops) -> None:
        self._config = config
        self._others = AdamW(config, ops)

    @torch.no_grad()
    def update(self, part: Slice, lr: float, step: int, grad_scale: float | Tensor) -> None:
        """Update `part` in place with step number `step`, counted from 1."""
        means = part.statistics
        if means is None:
            self._others.update(part, lr, step, grad_scale)
            return
        beta1, beta2 = self._config.betas
        direction = part.gradient * grad_scale
        means.values.lerp_(means.sum_(_means_of_squares(means, direction)), 1 - beta2)
        direction = torch.lerp(part.states["exp_avg"], direction, 1 - beta1, out=direction)
        part.states["exp_avg"].copy_(direction)
        kept = means.by_parameter(means.values / (1 - beta2**step))
        for run in means.runs():
            second = _second_moment(run, *kept[run.spec.name])
            direction[run.place].div_(second.sqrt_().add_(self._config.eps))
        part.apply(direction, step_size=lr / (1 - beta1**step), decay=lr * self._config.weight_decay)


def _means_of_squares(means: Statistics, gradient: Tensor) -> Tensor:
    """Return this rank's contributions to the row and column means, in the layout of `means.values`."""
    result = torch.zeros_like(means.values)
    views = means.by_parameter(result)
    for run in means.runs():
        row_means, column_means = views[run.spec.name]
        rows, begin = _rows(run)
        # The slice can begin and end inside a row. Elements of these rows outside of the slice stay zero.
        squares = gradient.new_zeros(len(rows) * run.spec.shape[-1])
        torch.square(gradient[run.place], out=squares[begin : begin + run.stop - run.start])
        squares = squares.view(len(rows), -1)
        row_means.view(-1)[rows.start : rows.stop] = squares.sum(1) / run.spec.global_shape[-1]
        belongs = one_hot(_matrix_of_row(run, row_means)[rows.start : rows.stop], column_means.shape[:2].numel()).to(
            squares
        )
        # A matrix product is deterministic: it sums in the same order every time.
        torch.mm(belongs.T, squares, out=column_means.flatten(0, 1))
        for sums, matrices in zip(column_means, matrices_of(run.spec.parameter), strict=True):
            sums /= matrices.rows
    return result


def _second_moment(run: OwnedRange, row_means: Tensor, column_means: Tensor) -> Tensor:
    """Return the second moments of consecutive elements `run`, [stop - start], from this rank's row and column
    means.
    """
    of_row = _matrix_of_row(run, row_means)
    columns = column_means.flatten(0, 1)
    rows, begin = _rows(run)
    # The scale is the mean of all squares, which is the mean of the column means and also the mean of the row means.
    # Use the means whose dim tensor parallelism does not split.
    scale = columns.mean(1)
    if matrices_of(run.spec.parameter)[0].split == 2:
        belongs = one_hot(of_row, len(columns)).to(columns)
        scale = row_means.flatten() @ (belongs / belongs.sum(0))
    factors = row_means.flatten() / scale.clamp_min(torch.finfo(scale.dtype).tiny)[of_row]
    second = columns[of_row[rows.start : rows.stop]].mul_(factors[rows.start : rows.stop, None])
    return second.view(-1)[begin : begin + run.stop - run.start]


def _rows(run: OwnedRange) -> tuple[range, int]:
    """Return (rows, offset): the rows that contain elements of the run, and the offset of the run's first element in
    these rows.

    A row is the last dim of this rank's part of the parameter.
    """
    length = run.spec.shape[-1]
    rows = range(run.start // length, -(-run.stop // length))
    return rows, run.start - rows.start * length


def _matrix_of_row(run: OwnedRange, row_means: Tensor) -> Tensor:
    """Return, for each row of this rank's part of a parameter, the index of the matrix that the row belongs to.

    A parameter has one matrix for each piece (such as q, k and v) and each expert.
    """
    parameter = run.spec.parameter
    shape = row_means.shape
    experts = torch.arange(shape[0] if parameter.kind is ParameterKind.EXPERTS else 1, device=row_means.device)
    result = torch.empty(shape, dtype=torch.int64, device=row_means.device)
    for index, matrices in enumerate(matrices_of(parameter)):
        piece = matrices.piece
        part = result.narrow(piece.dim, piece.start, piece.size) if piece else result
        part.copy_((index * len(experts) + experts).view(-1, *[1] * (len(shape) - 1)))
    return result.flatten()


register(ADAFACTOR, Adafactor)
