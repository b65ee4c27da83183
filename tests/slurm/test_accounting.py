"""The node-hours of a run are those of Slurm's accounting, spares and requeued starts included."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontier_llm.run import allocations
from tests.harness.accounting import accounting
from tests.harness.scenarios import training_cluster
from tests.harness.slurm import LocalSlurm
from tests.slurm.test_supervisor import Run


@pytest.fixture
def charged() -> Iterator[LocalSlurm]:
    """Start a cluster of two nodes whose jobs slurmdbd records."""
    with accounting() as settings, training_cluster(nodes=2, settings=settings) as running:
        yield running


@pytest.mark.thorough  # starts a database and slurmdbd, and requeues a job
@pytest.mark.timeout(600)
def test_node_hours_are_those_of_slurms_accounting(charged: LocalSlurm, tmp_path: Path) -> None:
    """A job of one node and a spare is requeued by its operator, so the first supervisor could not record its end."""
    env = {"FRONTIER_LLM_SPARE_NODES": "1", "STAND_IN_STEP_S": "0.5"}
    run = Run(charged, tmp_path, 2, 1, ("train.steps=60",), env)
    run.wait_step(20)
    charged.run("scontrol", "requeue", run.job_id)
    assert run.wait()["JobState"] == "COMPLETED", run.text()
    assert len(run.causes()) == 1, run.text()  # only the second start recorded its end

    def accounted() -> list[list[str]]:
        fields = "--format=State,AllocNodes,ElapsedRaw"
        options = ("--allocations", "--duplicates", "--noheader", "--parsable2", f"--jobs={run.job_id}", fields)
        return [line.split("|") for line in charged.run("sacct", *options).splitlines()]

    charged.wait_for(lambda: accounted()[-1][0] == "COMPLETED", 60, "end of the job in the accounting")
    seconds = [int(elapsed) for _, nodes, elapsed in accounted() if nodes == "2"]
    assert len(seconds) == 2 and min(seconds) >= 10
    billed = 2 * sum(seconds) / 3600
    own = allocations.node_hours(run.directory, {})
    assert own < billed, "the time between the last record and the end of the first allocation"
    status = (sys.executable, "-m", "frontier_llm.cli.main", "status", str(run.directory), "--json")
    (shown,) = json.loads(charged.run(*status, cwd=tmp_path))
    assert shown["node_hours"] == pytest.approx(billed, abs=1e-3)
