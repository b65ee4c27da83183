from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.harness.slurm import ROOT, LocalSlurm, local_slurm, why_unavailable


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalSlurm]:
    """Four nodes that claim 64 CPUs and 8 GPUs each; skipped with the reason where Slurm cannot run."""
    if reason := why_unavailable():
        pytest.skip(reason)
    with local_slurm(nodes=4) as running:
        running.env |= {
            "FRONTIER_LLM_PYTHON": sys.executable,
            "FRONTIER_LLM_SITE": "local",
            "FRONTIER_LLM_ROOT": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        yield running
