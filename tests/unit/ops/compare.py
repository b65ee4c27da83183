"""Compares an op of a back-end with the reference in float64, for a case of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from frontier_llm.ops.cases import Case


class Comparison:
    """Compares with a tolerance for each dtype, relative to the largest expected value."""

    def __init__(self, steps: Mapping[torch.dtype, float]) -> None:
        self.steps = steps

    def close(self, got: Tensor, expected: Tensor, factor: float = 1.0) -> None:
        """Assert that |got - expected| is within the rounding error of got's dtype."""
        assert got.shape == expected.shape
        scale = expected.abs().max().item() or 1.0
        error = (got.double() - expected).abs().max().item()
        assert error <= factor * self.steps[got.dtype] * scale, f"{got.dtype}: error {error:.2e} of {scale:.2e}"

    def case(self, ops: Any, case: Case, factor: float = 1.0) -> list[Tensor]:
        """Compare outputs and input gradients of a case. Returns the results of `ops`."""
        pairs = case.pairs(ops)
        for got, expected in pairs:
            self.close(got, expected, factor)
        return [got for got, _ in pairs]
