"""What a schedule keeps in flight, as formulas for numbers and arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

Number = Any


def splits_backward(name: str) -> bool:
    """Whether the schedule runs weight gradients as actions of their own."""
    return name == "zb-h1"


def peak_in_flight(name: str, stages: Number, chunks: Number, microbatches: Number, stage: Number) -> Number:
    """Chunk activations that a pipeline rank holds at its worst moment; `schedule.in_flight` counts the same on the action lists."""
    if name == "gpipe":
        return microbatches + 0 * np.asarray(stage)
    if name == "zb-h1":
        return np.minimum(microbatches, stages) + 0 * np.asarray(stage)
    if name == "interleaved":
        return np.minimum(microbatches * chunks, 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1)
    return np.minimum(microbatches, stages - stage)


def waiting_for_weights(name: str, stages: Number, chunks: Number, microbatches: Number, stage: Number) -> Number:
    """Of those, the ones whose input gradient is done and whose weight gradients are not, at the worst moment."""
    if name == "zb-h1":
        return np.minimum(microbatches, stages) - np.minimum(microbatches, stages - stage)
    return 0 * np.asarray(stage)
