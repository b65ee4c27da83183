"""The simulated figures of docs/benchmarks/scaling.md are those of the program that writes them."""

from __future__ import annotations

import pytest

from benchmarks.planner.scaling_tables import PAGE, ROOFLINES, STRONG, rooflines, strong_scaling, walltimes

TEXT = PAGE.read_text(encoding="utf-8")


def test_walltimes() -> None:
    assert "\n".join(walltimes()) in TEXT


@pytest.mark.parametrize("model", STRONG)
def test_strong_scaling(model: str) -> None:
    assert "\n".join(strong_scaling(model)) in TEXT


@pytest.mark.thorough
def test_rooflines() -> None:
    assert "\n".join(rooflines([model for model, _, _ in ROOFLINES])) in TEXT
