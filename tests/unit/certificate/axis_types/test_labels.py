"""Tests of the labels that are inferred from values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from frontier_llm.certificate.axis_types.labels import UNKNOWN, infer

WHOLE = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3).cos()
NOISE = torch.arange(12.0, dtype=torch.float64).view(4, 3).sin()
FIRST, SECOND = WHOLE.chunk(2)
LEFT, RIGHT = WHOLE.split((2, 1), dim=1)


@pytest.mark.parametrize(
    ("values", "label"),
    [
        pytest.param([WHOLE, WHOLE], ("R", "R"), id="equal"),
        pytest.param([FIRST, SECOND], ("R", "V"), id="rows"),
        pytest.param([RIGHT, LEFT], ("R", "V"), id="columns of different width"),
        pytest.param([WHOLE - NOISE, NOISE], ("R", "P"), id="summands"),
        pytest.param([WHOLE * 2, WHOLE * 2], UNKNOWN, id="counted twice"),
        pytest.param([FIRST, FIRST], UNKNOWN, id="one part twice"),
        pytest.param([WHOLE, NOISE], UNKNOWN, id="one rank is wrong"),
    ],
)
def test_labels_of_one_axis(values: list[Tensor], label: tuple[str, ...]) -> None:
    assert infer({(0, rank): value for rank, value in enumerate(values)}, WHOLE) == label


def test_labels_of_two_axes() -> None:
    parts = {
        (cp, tp): half - NOISE[:2] if tp else NOISE[:2] for cp, half in enumerate((FIRST, SECOND)) for tp in (0, 1)
    }
    assert infer(parts, WHOLE) == ("V", "P")
