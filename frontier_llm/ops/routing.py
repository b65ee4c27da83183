"""Reference implementations of the MoE ops: routing, gathering rows, and matrix products over groups of rows.

Routing computes scores over all experts, the `top_k` best experts, and their weights. A group consists of the rows of
one expert. Groups are stored one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.ops.dtypes import statistics_dtype


@dataclass(frozen=True)
class Routing:
    """Options for computing chosen experts and their weights from a router's logits."""

    top_k: int  # experts per token
    sigmoid: bool = False  # True: scores are sigmoids of the logits; False: softmax over all experts
    normalise: bool = True  # True: the weights of a token are normalised, so that their sum is `scale`
    scale: float = 1.0  # factor by which the weights are multiplied


def route(logits_NE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scores_NE, weights_Nk, experts_Nk), with each token's best expert first.

    Logits and bias have the type of the statistics (`statistics_dtype`). The best experts have the largest logits,
    which no back-end rounds. With a bias they have the largest sums of score and bias. Among equal experts the expert
    with the smallest index is chosen, so that all back-ends choose the same experts. NaN comes last. The bias does not
    change the weights and has no gradient.
    """
    scores_NE = logits_NE.sigmoid() if routing.sigmoid else logits_NE.softmax(-1)
    with torch.no_grad():
        preferred_NE = logits_NE if bias_E is None else scores_NE + bias_E
        preferred_NE = preferred_NE.masked_fill(preferred_NE.isnan(), -torch.inf)
        experts_Nk = preferred_NE.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k].contiguous()
    weights_Nk = scores_NE.gather(1, experts_Nk)
    if routing.normalise:
        weights_Nk = weights_Nk / (weights_Nk.sum(-1, keepdim=True) + 1e-20)  # all sigmoids of a token may be zero
    return scores_NE, weights_Nk * routing.scale, experts_Nk


def gather_rows(x_NH: Tensor, places_Mf: Tensor) -> Tensor:
    """Return, for each row of `places_Mf` (int64), the sum of the rows of x with these indices, shape (M, H).

    The index -1 adds nothing. The sum is in fp32 (fp64) and rounded once. With one index per row, this op only gathers.
    The backward of this case is `gather_rows` with the indices to which each row of x was copied.
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
