"""The committed job scripts run real training on four simulated nodes of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.run import run_dir
from frontier_llm.run.holder import last_start
from frontier_llm.run.rank_env import environment
from tests.harness.scenarios import scenario
from tests.harness.slurm import ENDED, ROOT, LocalSlurm

# Width and depth of a toy model. The tests are about degrees and node count.
TOY = (
    "model.layers=4",
    "model.hidden=64",
    "model.heads=8",
    "model.ffn_hidden=128",
    "model.vocab_size=250",
    "model.vocab_multiple=64",
    "model.sequence_length=16",
    "precision.dtype=fp32",
    "train.tensorboard=false",
    "train.recompute=none",
    "optimizer.warmup_steps=2",
)


def sbatch(
    cluster: LocalSlurm,
    script: str,
    directory: Path,
    *options: str,
    words: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> str:
    """Submit a committed script without a change. Only the partition differs from a job on Frontier."""
    local = ("--partition=local", f"--output={directory}/job.out", *options)
    directory.mkdir(parents=True, exist_ok=True)
    return cluster.submit(
        *local, str(ROOT / "slurm" / script), *TOY, f"train.run_dir={directory}/run", *words, cwd=ROOT, env=env
    )


def losses(directory: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in run_dir.steps(directory / "run")]


@pytest.mark.thorough  # 32 ranks
@pytest.mark.timeout(700)
def test_train_1t_runs_on_four_nodes_with_tp8_and_pp4(cluster: LocalSlurm, tmp_path: Path) -> None:
    words = ("parallel.pipeline=4", "batch.global_batch=4", "train.steps=3")
    job_id = sbatch(
        cluster,
        "train_1t.sbatch",
        tmp_path,
        "--nodes=4",
        "--time=20",
        "--signal=USR1@10",
        words=words,
        env={"FRONTIER_LLM_SIGNAL_LEAD_S": "10"},
    )
    job = cluster.wait_job(job_id, 540)
    text = (tmp_path / "job.out").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3]
    assert run_dir.latest_step(tmp_path / "run") == 0  # a benchmark saves nothing
    assert "this job takes 4 nodes for about 10 minutes" in text and "this job writes no checkpoint (0 bytes)" in text
    assert text.index("this job writes") < text.index("step 1/")  # before the ranks start
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["grid"]["tp"], plan["grid"]["pp"], plan["grid"]["dp"]) == (8, 4, 1)
    assert len(list((tmp_path / "run" / "logs" / "attempt_0001").glob("rank_*.log"))) == 32
    assert cluster.queued() == []


@pytest.mark.thorough
def test_a_benchmark_with_data_is_refused_and_the_production_script_trains(cluster: LocalSlurm, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "tokens", "u2") as writer:
        for start in range(100):
            writer.add_sequence([(start + offset) % 250 for offset in range(100)])
            writer.end_document()
    words = (
        f"data.train=[{{path: {tmp_path}/tokens}}]",
        "parallel.tensor=2",
        "parallel.pipeline=1",
        "batch.global_batch=4",
        "train.steps=4",
        "train.save_interval=2",
    )
    options = ("--nodes=2", "--ntasks-per-node=1", "--time=20", "--signal=USR1@10")
    env = {"FRONTIER_LLM_SIGNAL_LEAD_S": "10"}
    unsaved = (*words, "train.save_interval=0")
    refused = sbatch(cluster, "train_1t.sbatch", tmp_path / "refused", *options, words=unsaved, env=env)
    trained = sbatch(cluster, "pretrain_1t.sbatch", tmp_path / "trained", *options, words=words, env=env)
    assert cluster.wait_job(refused, 240)["ExitCode"] == "2:0"
    text = (tmp_path / "refused" / "job.out").read_text()
    assert "no checkpoint is written" in text and "slurm/pretrain_1t.sbatch" in text
    assert run_dir.attempts(tmp_path / "refused" / "run") == []
    assert cluster.wait_job(trained, 300)["ExitCode"] == "0:0", (tmp_path / "trained" / "job.out").read_text()
    assert run_dir.latest_step(tmp_path / "trained" / "run") == 4
    assert "2 checkpoints of" in (tmp_path / "trained" / "job.out").read_text()


@pytest.mark.thorough
def test_a_users_mistake_ends_the_run_at_once_and_blames_no_node(cluster: LocalSlurm, tmp_path: Path) -> None:
    """The batch shell detects in its first seconds that the data does not exist, and starts no rank."""
    words = ("data.train=[{path: /nowhere/tokens}]",)
    options = ("--nodes=2", "--ntasks-per-node=2")
    job_id = sbatch(
        cluster, "train_small.sbatch", tmp_path, *options, words=words, env={"FRONTIER_LLM_SIGNAL_LEAD_S": "10"}
    )
    assert cluster.wait_job(job_id, 240)["ExitCode"] == "2:0"
    assert "data.train: /nowhere/tokens.bin: no such file, nor tokens.idx" in (tmp_path / "job.out").read_text()
    assert run_dir.attempts(tmp_path / "run") == []
    assert run_dir.bad_hosts(tmp_path / "run") == []


STEPS = 50
SLICED = (
    "parallel.tensor=2",
    "parallel.pipeline=1",
    "batch.global_batch=4",
    f"train.steps={STEPS}",
    "train.save_interval=10",
)
# Minimum time of a step. A run whose node is killed at step 10 must still train when Slurm declares the node down. With
# SLURMD_TIMEOUT_S of 20 this is 33 s later, and a requeued job starts about 25 s after that.
SLOW = {"FRONTIER_LLM_FAILPOINTS": "train.step%=sleep:2"}


def loss_column(directory: Path) -> list[tuple[int, str]]:
    """Return (step, loss) for each step, with the loss as written in the file. If a step was repeated after a crash,
    the last value counts.
    """
    found = {}
    for line in (directory / "run" / "metrics.jsonl").read_text().splitlines():
        if '"kind": "step"' in line:
            words = dict(part.split(": ", 1) for part in line.strip("{}").split(", ") if ": " in part)
            found[int(words['"step"'])] = words['"loss"']
    return sorted(found.items())


_alone: list[list[tuple[int, str]]] = []
_one_at_a_time = threading.Lock()


def undisturbed(directory: Path) -> list[tuple[int, str]]:
    """Return the loss column of a run of local ranks without interruption. It runs only once per process."""
    with _one_at_a_time:
        if not _alone:
            words = [*TOY, *SLICED, f"train.run_dir={directory}/run"]
            command = [sys.executable, "-m", "frontier_llm.cli.main", "train", "train_small", *words]
            subprocess.run(
                command,
                cwd=ROOT,
                env={**environment(), "OMP_NUM_THREADS": "1"},
                check=True,
                timeout=300,
                capture_output=True,
            )
            _alone.append(loss_column(directory))
            assert [step for step, _ in _alone[0]] == list(range(1, STEPS + 1))
        return _alone[0]


@pytest.mark.thorough
@scenario(nodes=2)
def test_slices_of_a_short_walltime_give_the_same_losses(cluster: LocalSlurm, tmp_path: Path) -> None:
    # Slurm checks its timers every 30 s. The signal therefore comes 60 to 90 s after the start. 50 steps of 2 s take
    # longer.
    env = {**SLOW, "FRONTIER_LLM_SIGNAL_LEAD_S": "90"}
    options = ("--nodes=2", "--ntasks-per-node=1", "--time=3", "--signal=USR1@90")
    job_id = sbatch(cluster, "train_small.sbatch", tmp_path, *options, words=SLICED, env=env)
    seen: set[str] = set()

    def ended() -> bool:
        seen.update(cluster.queued())
        return cluster.job(job_id).get("JobState") in ENDED

    cluster.wait_for(ended, 600, f"end of the chain: {(tmp_path / 'job.out')}")
    text = (tmp_path / "job.out").read_text()
    job = cluster.job(job_id)
    assert job["JobState"] == "COMPLETED", text
    causes = [attempt.cause for attempt in run_dir.attempts(tmp_path / "run")]
    assert int(job["Restarts"]) == len(causes) - 1 >= 1
    assert causes == ["interrupted"] * (len(causes) - 1) + ["finished"]
    assert loss_column(tmp_path) == undisturbed(tmp_path / "alone")
    assert seen == {job_id} and cluster.queued() == []  # there was no second job, and no job is queued after the end


@pytest.mark.thorough
@scenario(nodes=3)
def test_a_dead_node_is_replaced_by_the_spare_and_the_losses_stay(cluster: LocalSlurm, tmp_path: Path) -> None:
    env = {**SLOW, "FRONTIER_LLM_SPARE_NODES": "1", "FRONTIER_LLM_SIGNAL_LEAD_S": "10"}
    job_id = sbatch(cluster, "train_small.sbatch", tmp_path, "--nodes=3", "--ntasks-per-node=1", words=SLICED, env=env)
    cluster.wait_for(lambda: run_dir.latest_step(tmp_path / "run") > 0, 200, "first checkpoint")
    cluster.kill_node("n1")
    job = cluster.wait_job(job_id, 300)
    text = (tmp_path / "job.out").read_text()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), text
    made = run_dir.attempts(tmp_path / "run")
    assert [attempt.cause for attempt in made] == ["node failure", "finished"], text
    assert [attempt.nodes for attempt in made] == [("n0", "n1"), ("n0", "n2")]
    assert loss_column(tmp_path) == undisturbed(tmp_path / "alone")
    assert len(list((tmp_path / "run" / "checkpoints" / "incarnations").glob("*.json"))) == 2


# Simulates another torch on node n1.
OTHER_TORCH_ON_N1 = """
import os
if os.environ.get("SLURMD_NODENAME") == "n1":
    import torch
    torch.__version__ = "2.9.0"
# The measured seconds are replaced. n2 needs twice as long as the other nodes.
seconds = 2 if os.environ.get("SLURMD_NODENAME") == "n2" else 1
os.environ["FRONTIER_LLM_FAILPOINTS"] = f"start.rates%=fill:{seconds}"
"""


SAYS = "rank 1 on n1 differs from most ranks: torch is torch 2.9.0 for CPUs instead of torch"


def train_with_another_torch_on_n1(
    cluster: LocalSlurm, tmp_path: Path, nodes: int, spares: int = 0
) -> tuple[dict[str, str], str]:
    """Run a job on `nodes` nodes and `spares` spare nodes. Returns the ended job and its output."""
    (tmp_path / "sitecustomize.py").write_text(OTHER_TORCH_ON_N1)
    words = (
        "parallel.tensor=1",
        "parallel.pipeline=1",
        "batch.global_batch=6",
        "batch.micro_batch=1",
        "train.steps=2",
        "guard.start_rates=true",
    )
    env = {"PYTHONPATH": str(tmp_path), "FRONTIER_LLM_SIGNAL_LEAD_S": "10", "FRONTIER_LLM_SPARE_NODES": str(spares)}
    job_id = sbatch(
        cluster, "train_small.sbatch", tmp_path, f"--nodes={nodes}", "--ntasks-per-node=1", words=words, env=env
    )
    return cluster.wait_job(job_id, 300), (tmp_path / "job.out").read_text()


@scenario(nodes=5)
def test_a_node_that_differs_and_a_slow_node_are_replaced_by_spares(cluster: LocalSlurm, tmp_path: Path) -> None:
    job, text = train_with_another_torch_on_n1(cluster, tmp_path, nodes=5, spares=2)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), text
    made = run_dir.attempts(tmp_path / "run")
    expected = [
        ("node failure", ("n0", "n1", "n2")),
        ("node failure", ("n0", "n2", "n3")),
        ("finished", ("n0", "n3", "n4")),
    ]
    assert [(attempt.cause, attempt.nodes) for attempt in made] == expected, text
    assert made[0].failed_host == "n1" and SAYS in made[0].detail
    assert made[1].failed_host == "n2" and "n2 reaches 0.50 of the median rate: its matrix product" in made[1].detail
    assert run_dir.bad_hosts(tmp_path / "run") == ["n1", "n2"]
    assert [step for step, _ in losses(tmp_path)] == [1, 2]


@pytest.mark.thorough
@scenario(nodes=3)
def test_a_node_that_differs_is_not_tried_again_where_there_is_no_spare(cluster: LocalSlurm, tmp_path: Path) -> None:
    job, text = train_with_another_torch_on_n1(cluster, tmp_path, nodes=3)
    assert job["ExitCode"] == "2:0" and "--exclude=n1" in text, text
    assert [attempt.cause for attempt in run_dir.attempts(tmp_path / "run")] == ["node failure"]
    assert losses(tmp_path) == [] and cluster.queued() == []


@pytest.mark.thorough
@scenario(nodes=2)
def test_a_node_that_differs_from_one_other_ends_the_job(cluster: LocalSlurm, tmp_path: Path) -> None:
    job, text = train_with_another_torch_on_n1(cluster, tmp_path, nodes=2)
    assert job["ExitCode"] == "2:0" and SAYS in text, text
    assert [attempt.cause for attempt in run_dir.attempts(tmp_path / "run")] == ["refused"]
    assert losses(tmp_path) == [] and cluster.queued() == []


@pytest.mark.thorough
@scenario(nodes=2)
def test_a_stale_rank_cannot_save_into_the_run(cluster: LocalSlurm, tmp_path: Path) -> None:
    """The job has a single rank, so the death of another rank cannot end it. After its node is declared dead, the rank
    continues to train, while the requeued job runs.
    """
    words = (
        "parallel.tensor=1",
        "parallel.pipeline=1",
        "batch.global_batch=4",
        "train.steps=70",
        "train.save_interval=10",
    )
    env = {**SLOW, "FRONTIER_LLM_SIGNAL_LEAD_S": "10"}
    job_id = sbatch(cluster, "train_small.sbatch", tmp_path, "--nodes=1", "--ntasks-per-node=1", words=words, env=env)
    run = tmp_path / "run"
    stale_log = tmp_path / "run" / "logs" / "attempt_0001" / "rank_0.log"
    cluster.wait_for(lambda: run_dir.latest_step(run) > 0, 200, "first checkpoint")
    host = str(last_start(run)["host"])
    cluster.kill_node(host)
    cluster.wait_for(lambda: "has been replaced by" in stale_log.read_text(), 300, "refusal of the stale rank")
    job = cluster.wait_job(job_id, 300)
    text = (tmp_path / "job.out").read_text()
    assert job["JobState"] == "COMPLETED" and int(job["Restarts"]) >= 1, text
    assert last_start(run)["host"] != host
    assert run_dir.latest_step(run) == 70
    # In a separate process, because another test may be reading this process's output.
    subprocess.run(
        [sys.executable, "-m", "frontier_llm.cli.main", "checkpoint", "verify", str(run)],
        cwd=ROOT,
        check=True,
        timeout=120,
    )
