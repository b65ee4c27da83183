"""The two types of a run: one for weights and activations, a wider one for sums."""

from __future__ import annotations

import torch

WORKING = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def working_dtype(name: str) -> torch.dtype:
    """What weights and activations are held in, by its name in the configuration: 'bf16' → torch.bfloat16."""
    return WORKING[name]


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """What is summed beside a working type: losses, norms, gradients, optimizer state. fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
