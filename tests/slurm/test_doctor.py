"""Runs `frontier-llm doctor` on four real slurmds, each of which has another planted fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.slurm import GPUS, ROOT, LocalSlurm

SITE = """
name: planted
machine: local
gpus_per_node: 8
tasks_per_node: 8
cpus_per_task: 1
bind: gcd
interfaces: [hsn0]
node_local: {root}/local
network_plugin: {plugin}
environment: {{SETTING: one}}
"""

# Python runs this file first if its folder is on PYTHONPATH. n2's clock is ahead, n3 has a different setting, n1's disk
# is full.
PLANTED = """
import collections, os, shutil, time
host = os.environ.get("SLURMD_NODENAME")
if host == "n2":
    true_time = time.time
    time.time = lambda: true_time() + 30
if host == "n3":
    os.environ["SETTING"] = "two"
if host == "n1":
    usage = collections.namedtuple("usage", "total used free")
    shutil.disk_usage = lambda path: usage(10**12, 10**12, 0)
os.sched_getaffinity = lambda pid: range(56)
"""


def plant(root: Path, host: str, gcds: int) -> None:
    (root / host / "sys/class/net/hsn0").mkdir(parents=True)
    (root / host / "sys/class/net/hsn0/operstate").write_text("up")
    for index in range(gcds):
        node = root / host / "sys/class/kfd/kfd/topology/nodes" / str(index)
        (node / "mem_banks/0").mkdir(parents=True)
        (node / "properties").write_text("simd_count 440\n")
        (node / "mem_banks/0/properties").write_text(f"size_in_bytes {64 * 2**30}\n")


def examine(cluster: LocalSlurm, tmp_path: Path, gcds: list[int], plugin: str, planted: bool) -> tuple[int, dict]:
    for host, count in zip(cluster.nodes, gcds, strict=True):
        plant(tmp_path, host, count)
    (tmp_path / "site.yaml").write_text(SITE.format(root=tmp_path, plugin=plugin))
    (tmp_path / "sitecustomize.py").write_text(
        PLANTED if planted else "import os\nos.sched_getaffinity = lambda pid: range(56)\n"
    )
    script = tmp_path / "doctor.sh"
    words = f"--site {tmp_path}/site.yaml --run-dir {tmp_path}/run --system-root '{tmp_path}/{{host}}' --json"
    script.write_text(
        f'#!/bin/bash\nexec "$FRONTIER_LLM_PYTHON" -m frontier_llm.cli.main doctor {words} > {tmp_path}/report.json\n'
    )
    # srun splits lines of more than 1,024 bytes
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "SETTING": "one" * 1500}
    job_id = cluster.submit(
        "-N4", "--ntasks-per-node=1", f"--output={tmp_path}/out", str(script), cwd=tmp_path, env=env
    )
    job = cluster.wait_job(job_id, 240)
    text = (tmp_path / "report.json").read_text()
    assert text, (tmp_path / "out").read_text()
    return int(job["ExitCode"].split(":")[0]), json.loads(text)


@pytest.mark.thorough
def test_healthy_nodes_are_called_healthy(cluster: LocalSlurm, tmp_path: Path) -> None:
    code, report = examine(cluster, tmp_path, [GPUS] * 4, "libc.so.6", planted=False)
    assert (code, report["findings"], report["hosts"]) == (0, [], cluster.nodes)
    assert report["seconds"] < 60


@pytest.mark.thorough
def test_every_planted_fault_is_found_on_its_node(cluster: LocalSlurm, tmp_path: Path) -> None:
    code, report = examine(cluster, tmp_path, [7, GPUS, GPUS, GPUS], "librccl-net-of-nobody.so", planted=True)
    assert code == 1
    found = {(finding["check"], tuple(finding["hosts"])) for finding in report["findings"]}
    assert ("GCDs", ("n0",)) in found
    assert ("local disk", ("n1",)) in found
    assert ("clock", ("n2",)) in found
    assert ("environment", ("n3",)) in found
    assert ("RCCL plugin", ("n0", "n1", "n2", "n3")) in found
    assert len(found) == 5
    # each node has a fault of its own; a missing plugin alone would exclude no node
    assert report["exclude"] == "n[0-3]"
    assert all(finding["remedy"] for finding in report["findings"])
