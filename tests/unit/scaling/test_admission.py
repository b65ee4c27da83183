"""Nothing expensive starts by accident, whichever way it is started."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster import run_dir, slurm
from frontier_llm.cluster.job import nothing_to_do
from frontier_llm.cluster.job_spec import make_job
from frontier_llm.config import available, load_run
from frontier_llm.errors import ConfigError, FrontierError
from frontier_llm.scaling.admission import Cost, admit_job

LARGE = ["train_22b", "train_175b", "train_1t"]
SUBMIT_1T = ["submit", "train_1t", "--site", "frontier", "--nodes", "384", "-A", "A", "--dry-run"]


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the batch shell of train_1t.sbatch finds on Frontier."""
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[001-384]",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURMD_NODENAME": "n001",
        "SLURM_JOB_PARTITION": "batch",
        "FRONTIER_LLM_SITE": "frontier",
        "FRONTIER_LLM_SIGNAL_LEAD_S": "2010",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "time_left_s", lambda job_id: 12 * 3600)


@pytest.mark.parametrize("name", LARGE)
def test_large_runs_as_shipped_are_short_benchmarks(name: str) -> None:
    config = load_run(name)
    assert config.data.train == "synthetic" and config.train.steps <= 20


@pytest.mark.parametrize("name", [name for name in available("runs") if "scaling" in name or name == "bench"])
def test_benchmarks_write_no_final_checkpoint(name: str) -> None:
    assert not load_run(name).train.save_final


def test_submit_refuses_a_long_run_on_synthetic_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SUBMIT_1T, f"train.run_dir={tmp_path}/r"]
    assert main([*words, "train.steps=15259"]) == 2
    assert "data.allow_synthetic=true" in capsys.readouterr().err
    assert main([*words, "train.steps=15259", "data.allow_synthetic=true"]) == 0
    assert "no limit is set" in capsys.readouterr().err
    assert main([*words, "--max-node-hours", "5000"]) == 0
    err = capsys.readouterr().err
    assert "cost: 20 steps of about" in err and "on 384 nodes" in err and "node-hours (predicted)" not in err
    assert "ends when 5,000.0 node-hours are used" in err


def test_a_bare_sbatch_makes_the_same_checks(allocation: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train_1t", f"train.run_dir={tmp_path}/r")
    with pytest.raises(ConfigError, match=r"15259 steps on synthetic data, about [\d,]+ node-hours"):
        admit_job(make_job((*words, "train.steps=15259")))
    with pytest.raises(ConfigError, match="GiB per device"):
        admit_job(make_job((*words, "train.recompute=none", "batch.micro_batch=4")))
    capsys.readouterr()
    admit_job(make_job(words))
    err = capsys.readouterr().err
    assert "cost: 20 steps of about" in err and "12 h" in err and "FRONTIER_LLM_MAX_NODE_HOURS" in err
    assert "384 nodes will import torch from" in err


def test_a_chain_pays_for_each_start_and_each_save() -> None:
    cost = Cost(steps=3240, step_s=10.0, nodes=100, slice_hours=2.0, lead_s=600.0, chained=True)
    assert cost.node_hours == 900.0 and cost.chain() == (6, 1200.0)  # of each job ten minutes start and ten minutes wait for its end
    assert Cost(1, 10.0, 100, 0.1, 600.0, True).chain() is None


def test_a_chain_ends_when_its_node_hours_are_used(allocation: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRONTIER_LLM_MAX_NODE_HOURS", "1000")
    job = make_job(("train_1t", f"train.run_dir={tmp_path}"))
    assert nothing_to_do(job) == "" and job.budget_left_s == pytest.approx(1000 * 3600 / 384)
    ended = run_dir.Attempt(1, "6", job.allocation.nodes, 0, 0, 75, "interrupted", started_unix_s=0.0, ended_unix_s=2 * 3600.0)
    run_dir.record(tmp_path, ended)
    assert job.budget_left_s == pytest.approx(232 * 3600 / 384) and job.budget_left_s > job.lead_s and nothing_to_do(job) == ""
    run_dir.record(tmp_path, ended)
    assert "1,536.0 of 1,000.0 node-hours are used" in nothing_to_do(job)
    monkeypatch.setenv("FRONTIER_LLM_MAX_NODE_HOURS", "many")
    with pytest.raises(FrontierError, match="'many' is not a number"):
        nothing_to_do(job)


def test_a_run_without_a_final_checkpoint_ends_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"train.run_dir={tmp_path}/r", "train.steps=2", "train.save_final=false", "model=gpt-tiny", "train.tensorboard=false"]
    layout = ["parallel.tensor=1", "parallel.pipeline=1", "batch.micro_batch=1", "batch.global_batch=2"]
    assert main(["train", "train_small", *words, *layout, "optimizer.warmup_steps=0", "train.device=cpu"]) == 0
    assert run_dir.latest_step(tmp_path / "r") == 0 and len(run_dir.steps(tmp_path / "r")) == 2


def test_a_benchmark_that_is_stopped_saves_nothing_unless_it_saves_in_between(tmp_path: Path) -> None:
    words = ["train.steps=100000", "train.save_final=false", "model=gpt-tiny", "train.tensorboard=false", "train.device=cpu"]
    layout = ["parallel.tensor=1", "parallel.pipeline=1", "batch.micro_batch=1", "batch.global_batch=2"]

    def saves(interval: int) -> bool:
        run = tmp_path / str(interval)
        stop = threading.Thread(target=stop_after_a_step, args=(run,))
        stop.start()
        assert main(["train", "train_small", *words, *layout, f"train.run_dir={run}", f"train.save_interval={interval}"]) == 75
        stop.join()
        return run_dir.latest_step(run) > 0

    assert not saves(0) and saves(99999)


def stop_after_a_step(run: Path) -> None:
    while not run_dir.steps(run):
        time.sleep(0.02)
    (run / run_dir.STOP_FILE).touch()


def test_a_job_whose_run_writes_no_final_checkpoint_is_finished(allocation: None, tmp_path: Path) -> None:
    job = make_job(("train_1t", f"train.run_dir={tmp_path}", "train.save_final=false"))
    assert nothing_to_do(job) == ""
    run_dir.record(tmp_path, run_dir.Attempt(1, "7", job.allocation.nodes, 0, 0, 0, "finished", started_unix_s=0.0, ended_unix_s=1.0))
    assert "without a final checkpoint" in nothing_to_do(job)
