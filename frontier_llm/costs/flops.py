"""FLOPs of the model and of the hardware, by stated convention; a multiply-add is two.

`full` counts attention scores over the whole S x S square: Megatron's 72·B·S·L·H²·(1 + S/6H + V/12LH) for GPT shapes
(Narayanan et al., SC21; Korthikanti et al. 2022). `causal` counts the half that a causal kernel computes. Model FLOPs (MFU) leave
recomputation out, hardware FLOPs (HFU) count it. Norms, activations and softmax are not counted, as everywhere.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from frontier_llm.config import ModelConfig
from frontier_llm.costs.workload import Number, Workload, model_numbers

Convention = Literal["full", "causal"]


def layer_flops_per_token(
    H: Number, A: Number, G: Number, D: Number, F: Number, gated: Number, S: Number, convention: Convention
) -> tuple[Number, Number]:
    """(matrix products, attention core) of one layer's forward."""
    matrices = 2.0 * (
        np.asarray(H) * (np.asarray(A) + 2 * np.asarray(G)) * D + np.asarray(A) * D * H + (2 + np.asarray(gated)) * np.asarray(H) * F
    )
    attention = 4.0 * np.asarray(S) * A * D * (0.5 if convention == "causal" else 1.0)
    return matrices, attention


def model_flops_per_token(model: ModelConfig, convention: Convention = "full") -> float:
    """Forward and backward FLOPs of one token: three times the forward, head included, recomputation left out."""
    shape = model_numbers(model)
    matrices, attention = layer_flops_per_token(*[shape[key] for key in ("H", "A", "G", "D", "F", "gated", "S")], convention=convention)
    return float(3 * (model.layers * (matrices + attention) + 2.0 * model.hidden * model.padded_vocab_size))


def hardware_flops_per_token(w: Workload, convention: Convention = "full") -> Number:
    """What the devices execute per token: the model's FLOPs and the recomputed forward (all of it, or the attention core)."""
    matrices, attention = layer_flops_per_token(w.H, w.A, w.G, w.D, w.F, w.gated, w.S, convention)
    again = np.where(np.asarray(w.recompute) == 2, matrices + attention, np.where(np.asarray(w.recompute) == 1, attention, 0.0))
    return np.asarray(w.layers) * (3 * (matrices + attention) + again) + 6.0 * np.asarray(w.H) * w.V


def utilisation(flops_per_token: Number, tokens_per_s_per_device: Number, peak_flops: float) -> Number:
    """Share of the device's peak: MFU with model FLOPs, HFU with hardware FLOPs."""
    return flops_per_token * tokens_per_s_per_device / peak_flops
