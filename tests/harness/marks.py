"""Cases that repeat what others hold: `scripts/test.sh` leaves them out, `scripts/test.sh --all` plays them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def thorough(*values: Any) -> Any:
    """A case of a parametrized test."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def but_first(cases: Sequence[Any], count: int = 1) -> list[Any]:
    """All cases of a parametrized test; the everyday run plays the first `count`."""
    return [*cases[:count], *(thorough(*case) if isinstance(case, tuple) else thorough(case) for case in cases[count:])]
