"""The reference of a router's choice: scores over all experts, the best few of them, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """How a router's logits become choices and weights."""

    top_k: int
    sigmoid: bool = False  # scores, else a softmax over all experts
    normalise: bool = True  # a token's weights sum to `scale`
    scale: float = 1.0


def route(logits_NE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """(scores_NE, weights_Nk, experts_Nk): what a token's experts weigh, best first; logits and bias are of the
    statistics' type.

    The best have the largest logits, which no back-end rounds, or with a bias the largest sums of score and bias. Of
    equal ones the first is taken, so that all back-ends choose alike; NaN comes last. The bias has no part in the
    weights, and no gradient.
    """
    scores_NE = logits_NE.sigmoid() if routing.sigmoid else logits_NE.softmax(-1)
    with torch.no_grad():
        preferred_NE = logits_NE if bias_E is None else scores_NE + bias_E
        preferred_NE = preferred_NE.masked_fill(preferred_NE.isnan(), -torch.inf)
        experts_Nk = preferred_NE.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k].contiguous()
    weights_Nk = scores_NE.gather(1, experts_Nk)
    if routing.normalise:
        weights_Nk = weights_Nk / (weights_Nk.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be zero
    return scores_NE, weights_Nk * routing.scale, experts_Nk
