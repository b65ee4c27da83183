"""Fixtures that every test may use."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share few cores with their ranks

from frontier_llm.machine.processor import limit_instruction_set

# FRONTIER_LLM_INSTRUCTION_SET=avx2 runs the tests as on a CPU with AVX2; called before torch is imported
limit_instruction_set()

from tests.harness.pool import RankPool  # noqa: E402
from tests.harness.summary import pytest_terminal_summary as pytest_terminal_summary  # noqa: E402
from tests.harness.workers import pytest_collection_modifyitems as pytest_collection_modifyitems  # noqa: E402
from tests.harness.workers import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler  # noqa: E402

# Hypothesis's checks of time are off, because a busy machine makes some of its examples slow at random.
# pytest's limit per test still applies.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to eight gloo ranks, started at first use and shared by the whole run: `ranks.run(world_size, function,
    *args)`.
    """
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="module", autouse=True)
def _free_memory() -> Iterator[None]:
    """Return freed memory to the system after each file. Otherwise glibc keeps it, and a worker grows to 2 GB."""
    yield
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Restore the environment after each test. Libraries set variables, for example DeepSpeed LOCAL_RANK, which would
    look like a launcher's variable to the next test.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
