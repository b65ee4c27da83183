"""Column- and row-parallel linear layers (arXiv:1909.08053 section 3), with and without sequence parallelism.

Each layer is one autograd function that contains its collective. The collective and the matrix product are split into
chunks, so that the collective of one chunk overlaps with the product of another (Wang et al., ASPLOS 2023, "Overlap
Communication with Dependent Computation via Decomposition"). The backward pass runs the collective of the input
gradient while the weight gradient is computed. The weight gradient is added to main_grad in fp32, at once or in a later
W action.

A chunk has rows of every rank's part of the sequence. One copy of the result restores the order of the rows. The copy
takes about 1/hidden of the product's time. With one chunk this copy is not needed. The order of the sum over ranks does
not depend on the chunks. So the result differs from an unsplit layer at most by the rounding inside the matrix
products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from frontier_llm.comm import (
    Axis,
    all_gather,
    all_reduce_,
    reduce_scatter,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
    start_reduce_scatter_into,
)
from frontier_llm.ops import statistics_dtype
from frontier_llm.parallel.tensor.context import LayerContext
from frontier_llm.parallel.tensor.gradients import Factor
from frontier_llm.parallel.tensor.parameter import Declared, ShardedParameter

Product = Callable[[Tensor], Tensor]  # (rows, B, k) → (rows, B, o), row by row


def gather_and_multiply(x_sBk: Tensor, multiply: Product, axis: Axis, chunks: int) -> tuple[Tensor, list[Tensor]]:
    """Return (multiply(all_gather(x)) as (S, B, o), the gathered chunks). `in_sequence` joins the chunks."""
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
    """Join gathered chunks in the order of the sequence: → (S, …). Each chunk has rows of every rank's part."""
    if len(gathered) == 1:
        return gathered[0]
    return torch.cat([chunk.unflatten(0, (axis.size, -1)) for chunk in gathered], dim=1).flatten(0, 1)


def multiply_and_scatter(x_SBk: Tensor, multiply: Product, axis: Axis, chunks: int) -> Tensor:
    """Return reduce_scatter(multiply(x)), this rank's part of the sum over the axis: (S, B, k) → (s, B, o)."""
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
    """Return all_reduce(multiply(x)), the complete sum over the axis on every rank: (S, B, k) → (S, B, o)."""
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


def _submit_weight_gradient(
    context: LayerContext, weight: ShardedParameter, grad_SBo: Factor, x_SBk: Factor
) -> Tensor | None:
    """Add gradᵀ x to the weight's gradient, now or in the W action.

    If `grad` has fewer features than the weight has rows (vocabulary padding), the other rows are not changed.
    """

    def accumulate(gradient: Tensor) -> None:
        grad_No = grad_SBo.whole().flatten(0, -2)
        x_Nk = x_SBk.whole().flatten(0, -2)
        context.ops.accumulate_weight_gradient_(gradient.view(-1, x_Nk.shape[1])[: grad_No.shape[1]], grad_No, x_Nk)

    return context.gradients.submit(weight, accumulate, (grad_SBo, x_SBk))


def _bias_gradient(grad_SBo: Tensor) -> Tensor:
    return grad_SBo.flatten(0, -2).sum(0, dtype=statistics_dtype(grad_SBo.dtype))


def _rows(weight: ShardedParameter, num_rows: int | None) -> Tensor:
    """Return the first rows of the weight as a matrix.

    Backward calls this function again, because FSDP may release the weight after forward and gather it again.
    """
    return weight.detach().flatten(0, -2)[:num_rows]


class _ColumnLinear(Function):
    """y_SBo = gather(x_sBH) Wᵀ + b.

    Saves only this rank's part of x and gathers it again in backward, as in Korthikanti et al. (arXiv:2205.05198).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
        num_rows: int | None,
        context: LayerContext,
    ) -> Tensor:
        weight_oH = _rows(weight, num_rows)
        ctx.context = context
        ctx.weight = weight
        ctx.num_rows = num_rows
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.save_for_backward(x)
        bias_o = None if bias is None else bias.flatten()

        def multiply(x_SBH: Tensor) -> Tensor:
            return context.ops.linear(x_SBH, weight_oH, bias_o)

        return (
            gather_and_multiply(x, multiply, context.tp, context.tensor_chunks)[0]
            if context.sequence_parallel
            else multiply(x)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_SBo,) = grads
        context = ctx.context
        (x,) = ctx.saved_tensors
        x_SBH = Factor(x, context.tp if context.sequence_parallel else None)
        if not context.gradients.waits:
            x_SBH.start()
        grad_x = context.ops.linear_input_gradient(grad_SBo, _rows(ctx.weight, ctx.num_rows))
        if context.sequence_parallel:
            grad_x, reducing = start_reduce_scatter(grad_x, context.tp)
        else:
            reducing = start_all_reduce_(grad_x, context.tp)
        # The weight gradient is computed while the input gradient is summed over tp.
        grad_weight = _submit_weight_gradient(context, ctx.weight, Factor(grad_SBo), x_SBH)
        grad_bias = None if ctx.bias_shape is None else _bias_gradient(grad_SBo).view(ctx.bias_shape)
        reducing.wait()
        return grad_x, grad_weight, grad_bias, None, None


class _RowLinear(Function):
    """y = sum over tp of x_SBk Wᵀ, plus b.

    The result is the complete sum (S) on each rank, or with sequence parallelism the rank's part of the sequence (s).
    """

    @staticmethod
    def forward(
        ctx: Any, x_SBk: Tensor, weight: ShardedParameter, bias: ShardedParameter | None, context: LayerContext
    ) -> Tensor:
        ctx.context = context
        ctx.weight = weight
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x_SBk)
        # Only tp rank 0 adds the bias, fused into its product. The sum over tp then contains the bias once.
        summand = bias if context.tp.rank == 0 else None

        def multiply(x_SBk: Tensor) -> Tensor:
            return context.ops.linear(x_SBk, weight.detach(), summand)

        if context.sequence_parallel:
            return multiply_and_scatter(x_SBk, multiply, context.tp, context.tensor_chunks)
        return multiply_and_reduce(x_SBk, multiply, context.tp, context.tensor_chunks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads
        context = ctx.context
        (x_SBk,) = ctx.saved_tensors

        def multiply(grad_SBH: Tensor) -> Tensor:
            return context.ops.linear_input_gradient(grad_SBH, ctx.weight.detach())

        if context.sequence_parallel:
            grad_x, gathered = gather_and_multiply(grad_y, multiply, context.tp, context.tensor_chunks)
            # If the weight gradient is deferred, keep only this rank's part of the output gradient, and gather it again
            # for the product. The gathered gradient would need more memory.
            grad_SBH = (
                Factor(grad_y, context.tp) if context.gradients.waits else Factor(in_sequence(gathered, context.tp))
            )
        else:
            grad_x = multiply(grad_y)
            grad_SBH = Factor(grad_y)
        # With sequence parallelism, the bias gradient covers only this rank's part of the sequence.
        grad_bias = _bias_gradient(grad_y) if ctx.has_bias else None
        return grad_x, _submit_weight_gradient(context, ctx.weight, grad_SBH, Factor(x_SBk)), grad_bias, None


def column_linear(
    x: Tensor,
    weight: ShardedParameter,
    context: LayerContext,
    bias: ShardedParameter | None = None,
    num_rows: int | None = None,
) -> Tensor:
    """Apply a column-parallel linear layer: (S or s, B, H) → (S, B, o).

    With `num_rows` only the first rows of the weight are used, for example the head without its vocabulary padding.
    """
    return _ColumnLinear.apply(x, weight, bias, num_rows, context)


class ColumnLinear(nn.Module):
    """Linear layer with output features split over tp: (S or s, B, H) → (S, B, o).

    The last dim of the weight is the input, and all other dims are output features.
    """

    def __init__(self, context: LayerContext, declared: Declared, name: str) -> None:
        super().__init__()
        self.context = context
        self.weight = declared[f"{name}.weight"].accumulated_by_layer()
        self.bias = declared.get(f"{name}.bias")

    def forward(self, x: Tensor, add_bias: bool = True, num_rows: int | None = None) -> Tensor:
        """Apply `column_linear`. With `add_bias=False` the caller adds the bias in a fused op."""
        return column_linear(x, self.weight, self.context, self.bias if add_bias else None, num_rows)


class RowLinear(nn.Module):
    """Linear layer with input features split over tp: (S, B, k) → (S or s, B, H).

    The result is summed over tp and contains the bias once.
    """

    def __init__(self, context: LayerContext, declared: Declared, name: str) -> None:
        super().__init__()
        self.context = context
        self.weight = declared[f"{name}.weight"].accumulated_by_layer()
        self.bias = declared.get(f"{name}.bias")

    def forward(self, x_SBk: Tensor) -> Tensor:
        """Multiply and sum over tp: (S, B, k) → (S or s, B, H)."""
        return _RowLinear.apply(x_SBk, self.weight, self.bias, self.context)
