"""Marks cases that repeat what other cases cover. `scripts/test.sh` leaves them out, and `scripts/test.sh --all` runs
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def thorough(*values: Any) -> Any:
    """Mark a case of a parametrized test."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def but_first(cases: Sequence[Any], count: int = 1) -> list[Any]:
    """Mark all cases of a parametrized test except the first `count`."""
    return [*cases[:count], *(thorough(*case) if isinstance(case, tuple) else thorough(case) for case in cases[count:])]
