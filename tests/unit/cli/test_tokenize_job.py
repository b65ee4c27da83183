"""`data tokenize --in-job`, with a batch shell whose Python has fewer packages than the Python of the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_llm.data.tokenize import tokenize
from frontier_llm.run.rank_env import COMMAND

SRUN = """while [[ "$1" == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0
export SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NODELIST=n0
exec "$@"
"""
BLOCKED = ("torch", "rich", "sentencepiece", "tokenizers", "safetensors")


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def in_job(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `data tokenize --in-job` in a job of one node."""
    executable(tmp_path / "bin" / "srun", SRUN)
    executable(tmp_path / "bin" / "sinfo", "echo 'n0|idle'")
    executable(tmp_path / "bin" / "squeue", "echo n0")
    small = tmp_path / "small"
    small.mkdir(exist_ok=True)
    block = f"import sys\nfor name in {BLOCKED}:\n    sys.modules[name] = None\n"
    (small / "sitecustomize.py").write_text(block)
    path = os.environ.get("PYTHONPATH", "")
    rank_python = executable(tmp_path / "rank_python", f'PYTHONPATH="{path}" exec {sys.executable} "$@"')
    variables = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{small}:{path}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n0",
        "SLURM_NTASKS": "1",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURMD_NODENAME": "n0",
        "FRONTIER_LLM_SITE": "local",
        "FRONTIER_LLM_RANK_PYTHON": str(rank_python),
    }
    command = [sys.executable, *COMMAND, "data", "tokenize", "--in-job", *words, "--workers", "1"]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    """Inputs and options for a dataset at PREFIX `tmp_path / "data"`."""
    (tmp_path / "text.txt").write_text("some text\n" * 200)
    return (str(tmp_path / "text.txt"), "--tokenizer", "bytes", "--output", str(tmp_path / "data"))


@pytest.mark.thorough
def test_a_job_of_one_node_makes_its_share_and_joins_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = in_job(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "has finished its share, 1 part" in done.stderr and "1 of 1 parts exist already" in done.stderr
    assert done.stdout.startswith(f"{tmp_path}/data: 1 documents, ")
    tokenize([tmp_path / "text.txt"], tmp_path / "alone", "bytes", workers=1)
    assert (tmp_path / "data.bin").read_bytes() == (tmp_path / "alone.bin").read_bytes()
    again = in_job(tmp_path, *words)
    assert again.returncode == 0 and "nothing to do" in again.stderr and "its share" not in again.stderr


def test_errors_of_each_step_end_the_job(tmp_path: Path, words: tuple[str, ...]) -> None:
    refused = in_job(tmp_path, str(tmp_path / "missing.txt"), *words[1:])
    assert refused.returncode == 2 and refused.stderr.count("missing.txt") == 1, refused.stderr
    (tmp_path / "bad.jsonl").write_text("no JSON\n")
    damaged = in_job(tmp_path, str(tmp_path / "bad.jsonl"), *words[1:])
    assert damaged.returncode == 2 and "the tasks on the nodes ended with exit code 2" in damaged.stderr
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith("data")]
    assert left == []
