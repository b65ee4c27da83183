"""Reference implementation of routing: scores over all experts, the `top_k` best experts, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Options for computing chosen experts and their weights from a router's logits."""

    top_k: int  # experts per token
    sigmoid: bool = False  # scores are sigmoids; otherwise a softmax over all experts
    normalise: bool = True  # the sum of a token's weights is `scale`
    scale: float = 1.0  # factor of the weights


def route(logits_NE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scores_NE, weights_Nk, experts_Nk), with each token's best expert first.

    Logits and bias have the type of the statistics (`statistics_dtype`). The best experts have the largest logits,
    which no back-end rounds. With a bias they have the largest sums of score and bias. Among equal experts the one with
    the smallest index is chosen, so that all back-ends choose the same experts. NaN comes last. The bias does not
    change the weights and has no gradient.
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
