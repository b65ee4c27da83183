"""The reference of rows on their way to experts and back, and of products over groups of them: the tokens of one
expert after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frontier_llm.ops.dtypes import statistics_dtype


def gather_rows(x_NH: Tensor, places_Mf: Tensor) -> Tensor:
    """Of each row of places (int64) the sum of those rows of x that it names, (M, H), in fp32 (fp64) and rounded once;
    -1 names none.

    One place each is a gather. Its backward is the same over where each row has gone.
    """
    padded = torch.cat((x_NH, x_NH.new_zeros(1, *x_NH.shape[1:])))
    rows_MfH = padded[places_Mf]
    if places_Mf.shape[1] == 1:
        return rows_MfH[:, 0]
    return rows_MfH.sum(1, dtype=statistics_dtype(x_NH.dtype)).to(x_NH.dtype)


def grouped_linear(x_Mk: Tensor, weight_Eok: Tensor, ends_E: Tensor) -> Tensor:
    """x @ weight[e]ᵀ for the rows of each group e, which stand one after the other; ends[e] (int32, on x's device) is
    the row past its last.

    What rows behind the last group give is not said.
    """
    y_Mo = x_Mk.new_empty(len(x_Mk), weight_Eok.shape[1])
    for group, rows in _groups(ends_E):
        y_Mo[rows] = x_Mk[rows] @ weight_Eok[group].t()
    return y_Mo


def grouped_input_gradient(grad_Mo: Tensor, weight_Eok: Tensor, ends_E: Tensor) -> Tensor:
    """grad @ weight[e] for each group's rows: what `grouped_linear` passes back to its input."""
    return grouped_linear(grad_Mo, weight_Eok.transpose(1, 2), ends_E)


def accumulate_grouped_gradient_(main_grad_Eok: Tensor, grad_Mo: Tensor, x_Mk: Tensor, ends_E: Tensor) -> None:
    """main_grad[e] += gradᵀ @ x over each group's rows, summed in main_grad's type."""
    dtype = main_grad_Eok.dtype
    for group, rows in _groups(ends_E):
        main_grad_Eok[group].addmm_(grad_Mo[rows].t().to(dtype), x_Mk[rows].to(dtype))


def _groups(ends_E: Tensor) -> list[tuple[int, slice]]:
    """(group, its rows) of those that have any. On a GPU the host waits for this."""
    ends = ends_E.tolist()
    return [
        (group, slice(begin, end))
        for group, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
        if end > begin
    ]
