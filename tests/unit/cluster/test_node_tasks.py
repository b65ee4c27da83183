"""One command on every node of a job: its srun, lost nodes and failed tasks."""

from __future__ import annotations

import subprocess

import pytest

from frontier_llm.cluster import node_tasks, slurm
from frontier_llm.cluster.node_tasks import run_on_nodes
from frontier_llm.errors import FrontierError
from frontier_llm.run import hostlist


class Job:
    """A job of three nodes. `codes` are the exit codes of its srun commands, `lost` the nodes lost by each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, codes: list[int], lost: list[list[str]]) -> None:
        self.commands: list[list[str]] = []
        self.codes = codes
        self.lost = [[], *lost]
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-2]")
        monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", "7")
        monkeypatch.setenv("SLURMD_NODENAME", "n0")
        monkeypatch.setenv("FRONTIER_LLM_SITE", "frontier")
        monkeypatch.setattr(slurm, "unhealthy", lambda nodes: self.lost.pop(0))
        monkeypatch.setattr(node_tasks.subprocess, "run", self._run)

    def _run(self, command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        self.commands.append(command)
        return subprocess.CompletedProcess(command, self.codes.pop(0))

    @property
    def nodes(self) -> list[tuple[str, ...]]:
        """The nodes of each srun."""
        words = [next(word for word in command if word.startswith("--nodelist=")) for command in self.commands]
        return [hostlist.expand(word.removeprefix("--nodelist=")) for word in words]


def test_each_node_gets_one_task_with_all_of_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, [0], [])
    run_on_nodes(["data", "tokenize", "a b"])
    (command,) = job.commands
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=56"} <= set(command)
    assert "--network=disable_rdzv_get" in command  # an option from the site's file
    assert command[-3:] == ["data", "tokenize", "a b"]


def test_the_other_nodes_do_the_work_of_a_lost_node(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, [1, 0], [["n1"]])
    run_on_nodes(["data"])
    assert job.nodes == [("n0", "n1", "n2"), ("n0", "n2")]


def test_a_failure_on_healthy_nodes_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, [2], [[]])
    with pytest.raises(FrontierError, match="ended with exit code 2"):
        run_on_nodes(["data"])
    assert len(job.commands) == 1
    Job(monkeypatch, [1, 1], [["n0"], ["n1", "n2"]])
    with pytest.raises(FrontierError, match="no node of this job is healthy"):
        run_on_nodes(["data"])
