"""Floating-point types of a run: the working type of weights and activations, and a wider type for sums."""

from __future__ import annotations

import torch

from frontier_llm.machine.processor import has_bf16_instructions

WORKING = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def working_dtype(name: str) -> torch.dtype:
    """Return the type of weights and activations by its name in the configuration: 'bf16' → torch.bfloat16."""
    return WORKING[name]


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which torch multiplies matrices of type `dtype`: fp32 for bf16 on a CPU that emulates it.

    torch's product of bf16 is 5 to 40 times slower than its fp32 product on a CPU without bf16 instructions.
    """
    is_emulated = device.type == "cpu" and dtype == torch.bfloat16 and not has_bf16_instructions()
    return torch.float32 if is_emulated else dtype


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of losses, norms, gradient sums and optimizer state: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
