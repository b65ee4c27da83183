"""The local Slurm leaves no process behind, even after failures of its nodes."""

from __future__ import annotations

import psutil
import pytest

from tests.harness.slurm import LocalSlurm, why_unavailable
from tests.harness.system import missing


@pytest.mark.thorough
def test_nothing_outlives_the_cluster() -> None:
    if reason := why_unavailable():
        missing(reason)
    cluster = LocalSlurm(nodes=1)
    try:
        cluster.start()
        job = cluster.submit("--ntasks=1", "--wrap=srun sleep 1000", cwd=cluster.root)
        cluster.wait_for(
            lambda: any(process.name() == "sleep" for process in cluster.processes()), 60, f"task of job {job}"
        )
        stepds = [process for process in cluster.processes() if process.name() == "slurmstepd"]
        assert len(stepds) == 2  # one for the batch script, and one for srun's step
        cluster.kill_node("n0")  # from now on no daemon ends them
    finally:
        cluster.stop()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in stepds)
