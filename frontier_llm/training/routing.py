"""Statistics of MoE routers per step, the update of their selection bias, and the detection of collapsed routers.

The selection bias balances the load of the experts (arXiv:2408.15664). A router has collapsed if it sends nearly all
tokens to one expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frontier_llm.config import ModelConfig
from frontier_llm.model import Stage


def summary(load_LE: NDArray[np.float64], model: ModelConfig) -> dict[str, Any]:
    """Return router statistics for the metrics: rows per expert over all layers, and figures of each layer.

    `load_LE` is `model.losses.LOAD`, summed over the step's global batch and copied to the host. A row is one
    token for one expert.
    """
    assert model.moe is not None
    rows_LE = load_LE[:, :-2]
    entropy_L = load_LE[:, -2]
    dropped_L = load_LE[:, -1]
    tokens = rows_LE.sum(1) / model.moe.top_k
    return {
        "rows_per_expert": rows_LE.sum(0).astype(int).tolist(),
        "largest_over_mean": (rows_LE.max(1) / rows_LE.mean(1)).tolist(),
        "smallest_over_mean": (rows_LE.min(1) / rows_LE.mean(1)).tolist(),
        "dropped_share": float(dropped_L.sum() / rows_LE.sum()),
        "entropy": (entropy_L / tokens).tolist(),  # nats; log E if all experts have equal scores
    }


@torch.no_grad()
def tell_routers(stages: Iterable[Stage], load_LE: Tensor) -> None:
    """Update the routers from `load_LE`, the number of tokens that each expert received in the step's global batch. The
    load is the same on all replicas.

    The next step's balance loss uses this load. The selection bias of each expert changes by `bias_rate`: up if the
    expert had less than the mean load, down if the expert had more.
    """
    for stage in stages:
        for layer, router in stage.routers():
            rows_E = load_LE[layer - stage.model.routed_layers.start, :-2]
            if router.load_E is not None:
                router.load_E.copy_(rows_E / rows_E.mean())
            if router.bias is not None:
                router.bias.add_(torch.sign(rows_E.mean() - rows_E).to(router.bias.dtype), alpha=router.moe.bias_rate)


SHARE = 0.8  # a router counts as collapsed if one expert receives at least this share of all tokens.
# Number of consecutive steps before a router counts as collapsed. In early training routers can exceed SHARE for a few
# steps and recover.
PATIENCE = 20


@dataclass(frozen=True)
class CollapsedRouter:
    """A layer whose busiest expert has had at least SHARE of all tokens for PATIENCE consecutive steps."""

    layer: int
    token_share: float

    def __str__(self) -> str:
        return (
            f"the router of layer {self.layer} has collapsed: for {PATIENCE} steps one expert has had "
            f"{self.token_share:.0%} of all tokens; "
            "raise model.moe.balance_weight, or set model.moe.selection_bias=true, and continue from an earlier "
            "checkpoint"
        )


class RouterWatch:
    """Detects collapsed routers from the router statistics of each step. The result is the same on every rank."""

    def __init__(self, model: ModelConfig) -> None:
        self._layers = model.routed_layers
        # value of largest_over_mean if all tokens go to one expert
        self._most = 0.0 if model.moe is None else model.moe.experts / model.moe.top_k
        self._in_a_row = dict.fromkeys(self._layers, 0)

    def step(self, routing: Mapping[str, Any]) -> Sequence[CollapsedRouter]:
        """Return the routers that have reached PATIENCE steps at this step.

        A collapsed router is returned once. It is returned again only if it has recovered and collapses again.
        """
        found = []
        for layer, largest in zip(self._layers, routing.get("largest_over_mean", ()), strict=False):
            share = largest / self._most
            self._in_a_row[layer] = self._in_a_row[layer] + 1 if share >= SHARE else 0
            if self._in_a_row[layer] == PATIENCE:
                found.append(CollapsedRouter(layer, share))
        return found
