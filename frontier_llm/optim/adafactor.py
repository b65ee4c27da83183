"""Adafactor's factored second moment (Shazeer & Stern 2018, arXiv:1804.04235) under AdamW's momentum, bias correction
and decay, for matrices; AdamW for the rest.

    R <- beta2 R + (1 - beta2) mean of G² over columns,   C likewise over rows,   V = R Cᵀ / mean of R

    W <- W - lr (M' / (sqrt(V') + eps) + decay W),   M <- beta1 M + (1 - beta1) G,   ' = corrected for the start at zero

So an update is as large as AdamW's and takes its learning rate. Adafactor's relative step sizes and clipping of updates
are left out: both are replacements for a tuned learning rate and the clipping of gradients, which a run has. Matrices
are those of the model: q, k and v, gate and up, each expert apart.
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
from frontier_llm.optim.adamw import AdamW
from frontier_llm.optim.buckets import OwnedRange
from frontier_llm.optim.matrices import Statistics
from frontier_llm.optim.registry import Slice, register


class Adafactor:
    """See SliceUpdate."""

    def __init__(self, config: OptimizerConfig, ops: Ops) -> None:
        self._config = config
        self._others = AdamW(config, ops)

    @torch.no_grad()
    def update(self, part: Slice, lr: float, step: int, grad_scale: float | Tensor) -> None:
        """See SliceUpdate."""
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
    """This rank's summands of the rows' and columns' means, laid out like `means.values`."""
    result = torch.zeros_like(means.values)
    views = means.by_parameter(result)
    for run in means.runs():
        row_means, column_means = views[run.spec.name]
        rows, begin = _rows(run)
        # zero where the first and the last row are another slice's
        squares = gradient.new_zeros(len(rows) * run.spec.shape[-1])
        torch.square(gradient[run.place], out=squares[begin : begin + run.stop - run.start])
        squares = squares.view(len(rows), -1)
        row_means.view(-1)[rows.start : rows.stop] = squares.sum(1) / run.spec.global_shape[-1]
        belongs = one_hot(_matrix_of_row(run, row_means)[rows.start : rows.stop], column_means.shape[:2].numel()).to(
            squares
        )
        torch.mm(belongs.T, squares, out=column_means.flatten(0, 1))  # a product adds in the same order every time
        for sums, matrices in zip(column_means, matrices_of(run.spec.parameter), strict=True):
            sums /= matrices.rows
    return result


def _second_moment(run: OwnedRange, row_means: Tensor, column_means: Tensor) -> Tensor:
    """[stop - start] of a parameter's elements, from all of this rank's means."""
    of_row = _matrix_of_row(run, row_means)
    columns = column_means.flatten(0, 1)
    rows, begin = _rows(run)
    # the mean of all squares, which the rows' mean is too: of those that tensor parallelism leaves whole
    scale = columns.mean(1)
    if matrices_of(run.spec.parameter)[0].split == 2:
        belongs = one_hot(of_row, len(columns)).to(columns)
        scale = row_means.flatten() @ (belongs / belongs.sum(0))
    factors = row_means.flatten() / scale.clamp_min(torch.finfo(scale.dtype).tiny)[of_row]
    second = columns[of_row[rows.start : rows.stop]].mul_(factors[rows.start : rows.stop, None])
    return second.view(-1)[begin : begin + run.stop - run.start]


def _rows(run: OwnedRange) -> tuple[range, int]:
    """(the rows of this rank's part of the parameter of which a run has elements, where in them it begins); a row is
    the last dim.
    """
    length = run.spec.shape[-1]
    rows = range(run.start // length, -(-run.stop // length))
    return rows, run.start - rows.start * length


def _matrix_of_row(run: OwnedRange, row_means: Tensor) -> Tensor:
    """[row] of this rank's part of a parameter: which of its matrices, counted by piece and expert, the row belongs
    to.
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
