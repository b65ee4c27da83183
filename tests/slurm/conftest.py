from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.scenarios import Scenarios, training_cluster
from tests.harness.slurm import LocalSlurm, why_unavailable
from tests.harness.system import missing


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalSlurm]:
    """Start four flat nodes of 64 cores, shared by tests that break nothing. Skips tests, with the reason, if Slurm
    cannot run.
    """
    if reason := why_unavailable():
        missing(reason)
    with training_cluster(nodes=4) as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def scenarios(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    """Start every selected scenario, at the same time as the tests that come before it (tests/harness/scenarios.py)."""
    if reason := why_unavailable():
        missing(reason)
    running = Scenarios(request.session.items, tmp_path_factory.mktemp)
    yield running
    running.stop()
