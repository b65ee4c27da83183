"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to eight gloo ranks, started at first use and shared by the whole run: `ranks.run(world_size, function, *args)`."""
    pool = RankPool()
    yield pool
    pool.stop()
