"""Compare a back-end's case of the catalogue with the reference in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from frontier_llm.ops.cases import Case


class Comparison:
    """Compares with tolerances by type of the result, relative to the largest expected value."""

    def __init__(self, steps: Mapping[torch.dtype, float]) -> None:
        self.steps = steps

    def close(self, got: Tensor, expected: Tensor, factor: float = 1.0) -> None:
        """|got - expected| within the rounding of got's type."""
        assert got.shape == expected.shape
        scale = expected.abs().max().item() or 1.0
        error = (got.double() - expected).abs().max().item()
        assert error <= factor * self.steps[got.dtype] * scale, f"{got.dtype}: error {error:.2e} of {scale:.2e}"

    def case(self, ops: Any, case: Case, factor: float = 1.0) -> list[Tensor]:
        """Outputs and input gradients of a case. Returns what `ops` computed."""
        pairs = case.pairs(ops)
        for got, expected in pairs:
            self.close(got, expected, factor)
        return [got for got, _ in pairs]
