"""The two floating-point types of a run: the working type for weights and activations, and a wider type for sums."""

from __future__ import annotations

import torch

WORKING = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def working_dtype(name: str) -> torch.dtype:
    """Return the type of weights and activations by its name in the configuration: 'bf16' → torch.bfloat16."""
    return WORKING[name]


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of losses, norms, gradient sums and optimizer state: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
