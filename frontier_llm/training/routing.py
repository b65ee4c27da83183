"""What the routers of a step did: figures for the metrics, and what routers keep of it: the selection bias that
evens the load (arXiv:2408.15664).
"""

from __future__ import annotations

from collections.abc import Iterable
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
