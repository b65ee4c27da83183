"""Reference implementations for experts: gathering rows of tokens, and matrix products over groups of rows.

A group has the tokens of one expert. Groups are stored one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frontier_llm.ops.dtypes import statistics_dtype


def gather_rows(x_NH: Tensor, places_Mf: Tensor) -> Tensor:
    """Return, for each row of `places_Mf` (int64), the sum of the rows of x with these indices, shape (M, H).

    The index -1 adds nothing. The sum is in fp32 (fp64) and rounded once. One index per row is a plain gather. Its
    backward is `gather_rows` with the indices to which each row of x was copied.
    """
    padded = torch.cat((x_NH, x_NH.new_zeros(1, *x_NH.shape[1:])))
    rows_MfH = padded[places_Mf]
    if places_Mf.shape[1] == 1:
        return rows_MfH[:, 0]
    return rows_MfH.sum(1, dtype=statistics_dtype(x_NH.dtype)).to(x_NH.dtype)


def grouped_linear(x_Mk: Tensor, weight_Eok: Tensor, ends_E: Tensor) -> Tensor:
    """Return x @ weight[e]ᵀ for the rows of each group e.

    Groups are stored one after the other. ends[e] (int32, on x's device) is the index after the last row of group e.
    Output rows after the last group are undefined.
    """
    y_Mo = x_Mk.new_empty(len(x_Mk), weight_Eok.shape[1])
    for group, rows in _groups(ends_E):
        y_Mo[rows] = x_Mk[rows] @ weight_Eok[group].t()
    return y_Mo


def grouped_input_gradient(grad_Mo: Tensor, weight_Eok: Tensor, ends_E: Tensor) -> Tensor:
    """Return grad @ weight[e] for the rows of each group e: the input gradient of `grouped_linear`."""
    return grouped_linear(grad_Mo, weight_Eok.transpose(1, 2), ends_E)


def accumulate_grouped_gradient_(main_grad_Eok: Tensor, grad_Mo: Tensor, x_Mk: Tensor, ends_E: Tensor) -> None:
    """Add gradᵀ @ x over the rows of each group e to main_grad[e], summed in main_grad's type."""
    dtype = main_grad_Eok.dtype
    for group, rows in _groups(ends_E):
        main_grad_Eok[group].addmm_(grad_Mo[rows].t().to(dtype), x_Mk[rows].to(dtype))


def _groups(ends_E: Tensor) -> list[tuple[int, slice]]:
    """Return (group, its rows) of each group that has rows. On a GPU the host waits for `ends_E`."""
    ends = ends_E.tolist()
    return [
        (group, slice(begin, end))
        for group, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
        if end > begin
    ]
