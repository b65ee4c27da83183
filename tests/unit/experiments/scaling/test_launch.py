"""Short runs inside an allocation: the nodes that they may use, and their time limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontier_llm.cluster import doctor, slurm
from frontier_llm.cluster.doctor import NodeFinding, Report
from frontier_llm.cluster.sites import load_site
from frontier_llm.errors import FrontierError
from frontier_llm.experiments.scaling.launch import GRACE_S, AllocationRanks, open_tool_job
from frontier_llm.run.job import read_job


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> AllocationRanks:
    """Runs on two nodes at a time, out of n0, n1 and n2."""
    variables = {"JOB_ID": "7", "JOB_NODELIST": "n[0-2]", "NTASKS_PER_NODE": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    monkeypatch.setattr(slurm, "unhealthy", lambda nodes: [])
    return AllocationRanks(load_site("local"), spares=1)


def fault(*hosts: str) -> NodeFinding:
    return NodeFinding("run directory", hosts, "cannot be written", "choose another")


def examined(monkeypatch: pytest.MonkeyPatch, *findings: NodeFinding) -> None:
    monkeypatch.setattr(doctor, "examine", lambda settings, nodes: Report(tuple(nodes), findings, 1.0))


def test_a_bad_node_is_left_out(ranks: AllocationRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examined(monkeypatch, fault("n1"))
    ranks.preflight(tmp_path)
    with ranks.borrow(2) as nodes:
        assert nodes == ("n0", "n2")


@pytest.mark.parametrize(
    ("findings", "fix"),
    [
        ([fault("n0", "n1", "n2")], "see the findings"),
        ([fault("n0", "n1", "n2"), fault("n1")], "see the findings"),
        ([fault("n0", "n1")], r"--exclude=n\[0-1\]"),
    ],
)
def test_nothing_starts_on_nodes_that_all_share_a_fault_or_are_too_few(
    ranks: AllocationRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, findings: list[NodeFinding], fix: str
) -> None:
    examined(monkeypatch, *findings)
    with pytest.raises(FrontierError, match=fix):
        ranks.preflight(tmp_path)


def test_a_short_run_ends_before_slurm_may_warn_its_ranks(
    ranks: AllocationRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "time_left_s", lambda job_id: 2000.0)
    site = load_site("local")
    assert ranks.time_left_s() == 2000 - site.warning_time_s - 60 - GRACE_S
    monkeypatch.setattr(slurm, "time_left_s", lambda job_id: 600.0)
    tool = open_tool_job(tmp_path, "train_small", ["job.warning_s=120", "train.steps=9"], site=site, spares=1)
    tool.record()
    recorded = read_job(tmp_path)
    assert recorded == tool.job and (recorded.nodes, recorded.spares, recorded.warning_s) == (2, 1, 120.0)
    assert tool.overrides == ("machine=local", "train.steps=9")
    assert tool.ranks.time_left_s() == 600 - 120 - 60 - GRACE_S  # a warning may come a minute early
