"""Runs a frontier-llm command with the Python of the ranks: on every node of this job, or in the batch shell.

The Python of the batch shell may lack the packages that the command needs, for example torch and tokenizers.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from frontier_llm import log
from frontier_llm.cluster import slurm
from frontier_llm.cluster.sites import Site, load_site
from frontier_llm.errors import FrontierError
from frontier_llm.run import hostlist
from frontier_llm.run.rank_env import COMMAND, environment, rank_python

REPEAT = "see the messages above, then submit the same command again: finished work is kept"


def node_command(site: Site, allocation: slurm.Allocation, nodes: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the srun command line that runs `frontier-llm WORDS` once on each of these nodes, with all of its cores.

    A task that fails does not end the other tasks.
    """
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--nodelist={hostlist.compress(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={allocation.tasks_per_node * allocation.cpus_per_task}",
        "--kill-on-bad-exit=0",
        "--wait=0",
        *(f"--{name}={value}" if value else f"--{name}" for name, value in site.srun.items()),
        *_rank_command(words),
    ]


def run_here(words: Sequence[str], stdout: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run `frontier-llm WORDS` once on this node. `stdout` is passed to subprocess.run. A failure raises no error."""
    return subprocess.run(  # noqa: S603 a list
        _rank_command(words), env=environment(), stdin=subprocess.DEVNULL, stdout=stdout, text=True, check=False
    )


def _rank_command(words: Sequence[str]) -> list[str]:
    return [rank_python(), *COMMAND, *words]


def run_on_nodes(words: Sequence[str]) -> None:
    """Run `frontier-llm WORDS` once on every healthy node of this job, and wait for all of them.

    If a node fails, the command runs again on the other nodes. The command must skip work that is already done. Raises
    FrontierError outside of a job, if no node is left, or if the command fails on a healthy node.
    """
    allocation = slurm.Allocation.from_environment()
    site = load_site()
    nodes: Sequence[str] = allocation.nodes
    lost: Sequence[str] = slurm.unhealthy(nodes)
    while True:
        nodes = [node for node in nodes if node not in lost]
        if not nodes:
            raise FrontierError("no node of this job is healthy", REPEAT, "job")
        command = node_command(site, allocation, nodes, words)
        code = subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, check=False).returncode  # noqa: S603
        if code == 0:
            return
        lost = slurm.unhealthy(nodes)
        if not lost:
            raise FrontierError(f"the tasks on the nodes ended with exit code {code}", REPEAT, "srun")
        log.warn(f"{hostlist.compress(lost)} failed; the other nodes do its remaining work")
