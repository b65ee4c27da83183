"""A start on the wrong device, or on nodes that differ, ends before the first step. The real command runs in separate
processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from frontier_llm.run.failure import Evidence, read_failure
from frontier_llm.run.launchers import free_port
from frontier_llm.run.run_dir import steps, untrusted_hosts

# A toy model with the structure and the keys of a shipped run.
TOY = (
    "model.layers=2",
    "model.hidden=64",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn_hidden=128",
    "model.vocab_size=250",
    "model.vocab_multiple=64",
    "model.sequence_length=16",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "batch.global_batch=6",
    "batch.micro_batch=1",
    "optimizer.warmup_steps=1",
    "train.steps=2",
    "train.recompute=none",
    "train.tensorboard=false",
    "ops.no_jit=true",
)
TIME_LIMIT_S = 600  # train.timeout_s of these runs. A start that waits for this timeout does not end within a test.
# Simulates another torch in a site's Python, only on the nodes in PLANTED_ON.
OTHER_TORCH = """
import os
if os.environ.get("SLURMD_NODENAME") in os.environ["PLANTED_ON"].split(","):
    import torch, torch.version
    torch.__version__, torch.version.cuda = "2.9.0", os.environ.get("PLANTED_CUDA")
"""


class Rank:
    """One process of a job, started like a task of srun or torchrun."""

    def __init__(self, run: str, words: tuple[str, ...], variables: dict[str, str]) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "FRONTIER_LLM"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "frontier_llm.cli.main", "train", run, *TOY, *words],
            env={**kept, "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        """Wait for the end. Returns exit code and output."""
        output, _ = self.process.communicate(timeout=TIME_LIMIT_S / 2)
        return self.process.returncode, output


def slurm_task(host: str) -> dict[str, str]:
    """Return the variables that srun sets for the only task of a job."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURMD_NODENAME": host,
    }


def train_on_hosts(hosts: list[str], tmp_path: Path, variables: dict[str, str], *words: str) -> list[tuple[int, str]]:
    """Run one rank on each of several simulated hosts. Returns exit code and output of each."""
    port = str(free_port())
    run_dir = f"train.run_dir={tmp_path}/run"
    (tmp_path / "run").mkdir()
    ranks = [
        Rank(
            "train_small",
            (run_dir, *words),
            {
                "RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SLURMD_NODENAME": host, **variables,
            },
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    return [rank.end() for rank in ranks]


@pytest.mark.parametrize("cuda", ["", "12.8"], ids=["CPU torch", "CUDA torch"])
def test_a_run_for_frontier_with_a_torch_without_rocm_is_refused_before_a_step(tmp_path: Path, cuda: str) -> None:
    """The run is derived from train_22b, in a Slurm step. An earlier version of the package trained this run to its end
    with reference ops on CPUs.
    """
    (tmp_path / "sitecustomize.py").write_text(OTHER_TORCH)
    planted = {"PYTHONPATH": str(tmp_path), "PLANTED_ON": "frontier00001" if cuda else "", "PLANTED_CUDA": cuda}
    code, output = Rank(
        "train_22b", (f"train.run_dir={tmp_path}/run",), {**slurm_task("frontier00001"), **planted}
    ).end()
    assert code == 2, output
    build = "torch 2.9.0 for CUDA 12.8" if cuda else " for CPUs"
    assert f"{build} on frontier00001 cannot use AMD GPUs, but train.device=auto means an AMD GPU (gfx90a)" in output
    assert "Traceback" not in output and steps(tmp_path / "run") == []
    failure = read_failure(tmp_path / "run")
    assert failure is not None and (failure.cause, failure.rank, failure.host) == ("refused", 0, "frontier00001")


def test_a_run_for_frontier_on_cpus_says_so_in_the_first_line_of_its_log(tmp_path: Path) -> None:
    words = (f"train.run_dir={tmp_path}/run", "train.device=cpu")
    code, output = Rank("train_22b", words, slurm_task("frontier00001")).end()
    assert code == 0, output
    first = output.splitlines()[0]
    assert "train.device=cpu: the ranks compute on CPUs, and no GPU of machine=frontier is checked" in first
    assert [row["step"] for row in steps(tmp_path / "run")] == [1, 2]


@pytest.mark.thorough
def test_a_host_with_another_torch_among_three_is_a_fault_of_that_node(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_TORCH)
    began_s = time.monotonic()
    ends = train_on_hosts(["n0", "n1", "n2"], tmp_path, {"PYTHONPATH": str(tmp_path), "PLANTED_ON": "n1"})
    assert time.monotonic() - began_s < TIME_LIMIT_S / 2
    failure = read_failure(tmp_path / "run")
    assert failure is not None, ends
    assert (failure.cause, failure.rank, failure.host, failure.excluded_hosts) == ("node failure", 1, "n1", ("n1",))
    assert failure.evidence is Evidence.COMPARISON and failure.host_suspect
    assert "rank 1 on n1 differs from most ranks: torch is torch 2.9.0 for CPUs instead of torch" in failure.what
    assert [code for code, _ in ends] == [1, 1, 1]
    assert all(failure.what in output and "Traceback" not in output for _, output in ends)
    assert untrusted_hosts(tmp_path / "run") == ["n1"] and steps(tmp_path / "run") == []


@pytest.mark.thorough
@pytest.mark.parametrize("host_count", [2, 3])
def test_a_rank_whose_gpu_fails_ends_all_ranks_with_its_error(tmp_path: Path, host_count: int) -> None:
    """With three hosts the error is a failure of one node, which another node can replace. With two hosts the start is
    refused, because the faulty host cannot be determined.
    """
    hosts = [f"n{number}" for number in range(host_count)]
    ends = train_on_hosts(
        hosts,
        tmp_path,
        {"FRONTIER_LLM_FAILPOINTS": "start.device@1=error:HIP error: no ROCm-capable device is detected"},
    )
    expected, code = ("node failure", 1) if host_count == 3 else ("refused", 2)
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (failure["cause"], failure["rank"], failure["host"]) == (expected, 1, "n1")
    assert [end for end, _ in ends] == [code] * host_count
    said = "the GPU of rank 1 on n1 cannot be used: HIP error: no ROCm-capable device is detected"
    assert all(said in output and "Traceback" not in output for _, output in ends), ends
    assert steps(tmp_path / "run") == []
