"""Marks cases that repeat what other cases cover.

`scripts/test.sh` leaves cases marked `thorough` out, and `scripts/test.sh --all` runs them. Cases marked `exhaustive`
run only with `scripts/test.sh --exhaustive`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def thorough(*values: Any) -> Any:
    """Mark a case of a parametrized test."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def exhaustive(*values: Any) -> Any:
    """Mark a case of a parametrized test that not even CI runs."""
    return pytest.param(*values, marks=[pytest.mark.thorough, pytest.mark.exhaustive])


def but_first(cases: Sequence[Any], count: int = 1, in_ci: int | None = None) -> list[Any]:
    """Mark all cases of a parametrized test except the first `count`. CI runs the first `in_ci` of them (None: all)."""

    def marked(mark: Callable[..., Any], chosen: Sequence[Any]) -> list[Any]:
        return [mark(*case) if isinstance(case, tuple) else mark(case) for case in chosen]

    last = len(cases) if in_ci is None else in_ci
    return [*cases[:count], *marked(thorough, cases[count:last]), *marked(exhaustive, cases[last:])]
