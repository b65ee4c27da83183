"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share few cores with their ranks

from tests.harness.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to eight gloo ranks, started at first use and shared by the whole run: `ranks.run(world_size, function, *args)`."""
    pool = RankPool()
    yield pool
    pool.stop()
