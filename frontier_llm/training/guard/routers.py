"""A router that has collapsed sends nearly all tokens to the same expert; the others stop learning, and the loss
shows it late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frontier_llm.config import ModelConfig

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
