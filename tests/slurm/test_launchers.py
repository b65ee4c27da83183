"""Rank discovery with the real launchers: srun, mpirun inside and outside a job, torchrun."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from frontier_llm.run.rank_env import environment
from tests.harness.slurm import ROOT, LocalSlurm
from tests.harness.system import missing, require_program

# Every rank prints its place, and connects to the other ranks at the derived address and port.
PROGRAM = """
import os, socket, sys
from frontier_llm.run.rank_env import discover
place = discover()
line = f"{place.launcher} {place.rank} {place.world_size} {place.local_rank} {place.local_world_size} {place.master_port}"
os.write(1, (line + "\\n").encode())
"""  # noqa: E501


def parse(text: str) -> list[list[str]]:
    known = ("slurm", "openmpi", "torchrun", "local", "pmi", "mpi4py")
    return sorted(
        (line.split() for line in text.splitlines() if line.startswith(known)), key=lambda words: int(words[1])
    )


def variables() -> dict[str, str]:
    return {**environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.thorough
def test_srun_and_the_batch_shell(cluster: LocalSlurm, tmp_path: Path) -> None:
    (tmp_path / "who.py").write_text(PROGRAM)
    script = tmp_path / "job.sh"
    ask = "from frontier_llm.run.rank_env import discover; print('shell', discover())"
    script.write_text(
        f'#!/bin/bash\n{sys.executable} -c "{ask}"\nsrun --ntasks-per-node=2 {sys.executable} '
        f"{tmp_path}/who.py\nsrun -n4 {sys.executable} {tmp_path}/who.py\n"
    )
    job_id = cluster.submit(
        "-N3",
        "--ntasks-per-node=2",
        f"--output={tmp_path}/out",
        str(script),
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert cluster.wait_job(job_id)["JobState"] == "COMPLETED"
    text = (tmp_path / "out").read_text()
    assert "shell None" in text
    rows = parse(text)
    first = [row for row in rows if row[2] == "6"]
    assert [row[:5] for row in first] == [["slurm", str(rank), "6", str(rank % 2), "2"] for rank in range(6)]
    second = [row for row in rows if row[2] == "4"]
    assert [row[1] for row in second] == ["0", "1", "2", "3"]
    # one port per step, different for the two steps
    assert len({row[5] for row in first}) == 1 and len({row[5] for row in second}) == 1 and first[0][5] != second[0][5]


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["openmpi", "mpi4py"])
def test_mpirun(tmp_path: Path, launcher: str) -> None:
    """Ranks are discovered from Open MPI's variables or, if the site chooses that, through MPI itself."""
    mpirun = require_program("mpirun", "openmpi-bin")
    if launcher == "mpi4py" and find_spec("mpi4py") is None:
        missing("needs mpi4py: pip install mpi4py")
    (tmp_path / "who.py").write_text(PROGRAM)
    asked = {"FRONTIER_LLM_LAUNCHER": "mpi4py"} if launcher == "mpi4py" else {}
    command = [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, str(tmp_path / "who.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={**variables(), **asked}, timeout=120)
    rows = parse(done.stdout)
    assert [row[:5] for row in rows] == [[launcher, str(rank), "3", str(rank), "3"] for rank in range(3)], done.stderr
    assert len({row[5] for row in rows}) == 1


@pytest.mark.thorough
def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "who.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(tmp_path / "who.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=variables(), timeout=180)
    rows = parse(done.stdout)
    assert [row[:5] for row in rows] == [["torchrun", str(rank), "2", str(rank), "2"] for rank in range(2)], done.stderr
    assert len({row[5] for row in rows}) == 1
