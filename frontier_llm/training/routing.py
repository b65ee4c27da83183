"""Routers of a step: figures for the metrics, the selection bias that evens the load (arXiv:2408.15664), and a watch
for routers that send all tokens to one expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frontier_llm.config import ModelConfig
from frontier_llm.model import Stage


def summary(load_LE: Tensor, model: ModelConfig) -> dict[str, Any]:
    """For people, from `model.experts.Routed.load` summed over the step: rows of each expert over all layers, and
    figures of each layer.
    """
    assert model.moe is not None
    rows_LE = load_LE[:, :-2]
    entropy_L = load_LE[:, -2]
    dropped_L = load_LE[:, -1]
    tokens = rows_LE.sum(1) / model.moe.top_k
    return {
        "rows_per_expert": rows_LE.sum(0).long().tolist(),
        "largest_over_mean": (rows_LE.amax(1) / rows_LE.mean(1)).tolist(),
        "smallest_over_mean": (rows_LE.amin(1) / rows_LE.mean(1)).tolist(),
        "dropped_share": float(dropped_L.sum() / rows_LE.sum()),
        "entropy": (entropy_L / tokens).tolist(),  # nats; log E where all experts score alike
    }


@torch.no_grad()
def tell_routers(stages: Iterable[Stage], load_LE: Tensor) -> None:
    """The load of the step's global batch, the same on all replicas: for the balance of the next, and for the selection
    bias.

    That moves towards experts that had less than the mean, by one rate whatever the distance.
    """
    for stage in stages:
        for layer, router in stage.routers():
            rows_E = load_LE[layer - stage.model.routed_layers.start, :-2]
            if router.load_E is not None:
                router.load_E.copy_(rows_E / rows_E.mean())
            if router.bias is not None:
                router.bias.add_(torch.sign(rows_E.mean() - rows_E).to(router.bias.dtype), alpha=router.moe.bias_rate)


SHARE = 0.8  # of all tokens that go to one expert
PATIENCE = 20  # steps in a row: routers sway at the beginning, and come back


@dataclass(frozen=True)
class CollapsedRouter:
    """A layer whose busiest expert has had this share of all tokens for PATIENCE steps."""

    layer: int
    token_share: float

    def __str__(self) -> str:
        return (
            f"the router of layer {self.layer} has collapsed: for {PATIENCE} steps one expert has had "
            f"{self.token_share:.0%} of all tokens; "
            "raise model.moe.balance_weight, or set model.moe.selection_bias=true, and go on from a checkpoint before"
        )


class RouterWatch:
    """Judges each step by the figures of train.routing; the same on every rank."""

    def __init__(self, model: ModelConfig) -> None:
        self._layers = model.routed_layers
        # largest over mean where all tokens go to one
        self._most = 0.0 if model.moe is None else model.moe.experts / model.moe.top_k
        self._in_a_row = dict.fromkeys(self._layers, 0)

    def step(self, routing: Mapping[str, Any]) -> Sequence[CollapsedRouter]:
        """Routers of which it can be said from this step on; each once, until it recovers."""
        found = []
        for layer, largest in zip(self._layers, routing.get("largest_over_mean", ()), strict=False):
            share = largest / self._most
            self._in_a_row[layer] = self._in_a_row[layer] + 1 if share >= SHARE else 0
            if self._in_a_row[layer] == PATIENCE:
                found.append(CollapsedRouter(layer, share))
        return found
