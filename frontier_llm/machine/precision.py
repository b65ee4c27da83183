"""What a device's 16-bit arithmetic does that the format does not promise, in words for whoever has chosen it."""

from __future__ import annotations

from frontier_llm.config import PrecisionConfig

# MI200 (MI210, MI250, MI250X); all other AMD GPUs keep subnormal numbers (PyTorch docs, "Numerical accuracy")
FLUSHING = "gfx90a"


def fp16_note(precision: PrecisionConfig, flushes_fp16: bool) -> str:
    """A warning for a run in fp16 on a device that flushes; '' where there is nothing to say."""
    if precision.dtype != "fp16" or not flushes_fp16:
        return ""
    scale = (
        ""
        if precision.initial_loss_scale is None
        else "; else leave precision.initial_loss_scale out, so that it follows the batch"
    )
    return (
        "precision.dtype=fp16: MI250X's matrix products take numbers below 6.1e-5 for zero, small gradients among "
        "them (docs/numerics.md). "
        f"precision.dtype=bf16 is as fast and has no such limit{scale}"
    )
