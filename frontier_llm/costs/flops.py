"""Model FLOPs: what the mathematics needs, whatever the runtime recomputes; and hardware FLOPs, which count that too."""

from __future__ import annotations

import numpy as np

from frontier_llm.config import ModelConfig
from frontier_llm.costs.workload import Number, Workload


def matrix_parameters(model: ModelConfig) -> int:
    """Weights that every token is multiplied with: the layers' matrices and the output head (tied or not), no embedding lookup."""
    H, D = model.hidden, model.dim_per_head
    attention = H * D * (2 * model.heads + 2 * model.num_kv_heads)
    mlp = (3 if model.gated else 2) * H * model.ffn_hidden
    return model.layers * (attention + mlp) + H * model.vocab_size


def forward_flops_per_token(model: ModelConfig, causal: bool = False) -> float:
    """2 FLOPs per weight and token, and 4·S·A·D per layer for the scores and their weighted sum.

    `causal=False` counts the full S x S square, as the field's MFU does (PaLM, arXiv:2204.02311 appendix B; Megatron's
    72·B·s·L·h²(1 + s/6h + V/12Lh)); `causal=True` counts the half that is computed.
    """
    scores = 4.0 * model.sequence_length * model.heads * model.dim_per_head * model.layers
    return 2.0 * matrix_parameters(model) + (scores / 2 if causal else scores)


def model_flops_per_token(model: ModelConfig, causal: bool = False) -> float:
    """Forward and backward: backward computes two gradients for every product, so 3 x forward. Recomputation does not count."""
    return 3.0 * forward_flops_per_token(model, causal)


def hardware_flops_per_token(w: Workload, causal: bool = False) -> Number:
    """What the devices execute per token: the model's FLOPs, padding rows of the head, and the recomputed forward.

    Full recomputation repeats a layer's forward, selective its attention core. For a `Workload`, so arrays work.
    """
    H, heads, groups = np.asarray(w.H, dtype=float), np.asarray(w.A) * w.D, np.asarray(w.G) * w.D
    matrices = 2.0 * (H * (heads + 2 * groups) + heads * H + (2 + np.asarray(w.gated)) * H * w.F)
    scores = 4.0 * np.asarray(w.S) * heads * (0.5 if causal else 1.0)
    again = np.where(np.asarray(w.recompute) == 2, matrices + scores, np.where(np.asarray(w.recompute) == 1, scores, 0.0))
    return np.asarray(w.layers) * (3 * (matrices + scores) + again) + 6.0 * H * w.V
