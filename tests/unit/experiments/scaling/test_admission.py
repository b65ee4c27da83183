"""No expensive job starts by accident, however it is started."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster import slurm
from frontier_llm.cluster.admission import Cost, admit_job
from frontier_llm.cluster.batch import open_batch
from frontier_llm.cluster.sbatch import JOBS
from frontier_llm.config import TrainConfig, available, load_run, saves_between, saves_nothing
from frontier_llm.config.phases import PRODUCTION
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.errors import ConfigError
from frontier_llm.planner.predict import planned_saves
from frontier_llm.run import run_dir
from tests.harness.slurm import ROOT

LARGE = ["train_22b", "train_175b", "train_1t"]
WARNED = "job.warning_s=2010"
ON_384_NODES = ["--site", "frontier", "--nodes", "384", "-A", "A", "--dry-run"]
SUBMIT_1T = ["submit", "train_1t", *ON_384_NODES]
SYNTHETIC = ["data.train=synthetic", "data.allow_synthetic=true"]


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of the batch shell of train_1t.sbatch on Frontier."""
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[001-384]",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURMD_NODENAME": "n001",
        "SLURM_JOB_PARTITION": "batch",
        "FRONTIER_LLM_SITE": "frontier",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "time_left_s", lambda job_id: 12 * 3600)


@pytest.mark.parametrize("name", LARGE)
def test_large_runs_as_shipped_are_short_benchmarks(name: str) -> None:
    config = load_run(name)
    assert config.data.train == "synthetic" and config.train.steps == 5


@pytest.mark.parametrize(
    "name", [*LARGE, *(name for name in available("runs") if "scaling" in name or name == "bench")]
)
def test_benchmarks_write_no_checkpoint(name: str) -> None:
    assert saves_nothing(load_run(name).train)


@pytest.mark.parametrize("script", PRODUCTION.values())
def test_production_runs_save_at_the_planners_interval(script: str) -> None:
    (job,) = [job for job in JOBS if job.name == script]
    config = load_run(script)
    benchmark = load_run(script.replace("pretrain", "train"))
    saves = planned_saves(config, job.nodes * 8)
    assert saves is not None and config.train.save_interval == saves.interval_steps and config.train.save_final
    assert (config.model, config.parallel, config.batch) == (benchmark.model, benchmark.parallel, benchmark.batch)
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "pretrain_intervals.py"), "--check"], check=False)
    assert done.returncode == 0, "run python scripts/pretrain_intervals.py"


@pytest.mark.thorough
@pytest.mark.usefixtures("quick_submit")
@pytest.mark.parametrize(
    "unsaved", ["train.steps=21", "data.train=[{path: DATA}]", "train.phases=[{steps: 5, data: {train: DATA}}]"]
)
def test_a_benchmark_that_became_a_run_is_refused_with_the_production_script(
    allocation: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], unsaved: str
) -> None:
    """Both `submit` and the batch shell of slurm/train_1t.sbatch refuse it."""
    with IndexedWriter(tmp_path / "tokens", "u2") as writer:
        writer.add_sequence(list(range(10_000)))
        writer.end_document()
    words = [unsaved.replace("DATA", str(tmp_path / "tokens")), f"train.run_dir={tmp_path}/r"]
    assert main([*SUBMIT_1T, *words]) == 2
    refusal = capsys.readouterr().err
    assert (
        "no checkpoint is written" in refusal and "slurm/pretrain_1t.sbatch (configs/runs/pretrain_1t.yaml)" in refusal
    )
    with pytest.raises(ConfigError, match=r"no checkpoint is written[^$]*slurm/pretrain_1t\.sbatch"):
        admit_job(open_batch(("train_1t", *words)))
    main([*SUBMIT_1T, *words, "train.save_final=true"])  # this data has fewer tokens than a batch
    assert "no checkpoint is written" not in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.usefixtures("quick_submit")
def test_a_benchmark_that_does_not_fit_its_walltime_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SUBMIT_1T, f"train.run_dir={tmp_path}/r", "--time", "0:30:00"]
    assert main(words) == 2
    assert (
        "5 steps and the start take about 61 minutes" in (said := capsys.readouterr().err)
        and "--time 01:01:00 or more" in said
    )
    assert main([*words, "--time", "1:01:00"]) == 0


@pytest.mark.parametrize(
    ("train", "done", "until", "count"),
    [
        ({"steps": 10, "save_interval": 3}, 0, 10, 4),
        ({"steps": 9, "save_interval": 3}, 0, 9, 3),
        ({"steps": 9, "save_interval": 3, "save_final": False}, 0, 9, 2),
        ({"steps": 10, "save_interval": 3}, 3, 7, 1),
        ({"steps": 10, "save_interval": 10, "save_final": False}, 0, 10, 0),
        ({"steps": 10}, 0, 10, 1),
        ({"steps": 10, "save_final": False, "keep_best": "validation", "eval_interval": 4}, 0, 10, 3),
    ],
)
def test_checkpoints_are_counted(train: dict[str, Any], done: int, until: int, count: int) -> None:
    assert saves_between(TrainConfig(**train), done, until) == count


@pytest.mark.parametrize(
    "words", [["train.steps=9", "train.save_interval=3"], ["train.steps=4", "train.save_final=false"]]
)
def test_as_many_checkpoints_are_written_as_counted(tmp_path: Path, words: list[str]) -> None:
    toy = [
        "model=gpt-tiny",
        "train.tensorboard=false",
        "train.device=cpu",
        "optimizer.warmup_steps=0",
        "train.keep_checkpoints=9",
    ]
    layout = ["parallel.tensor=1", "parallel.pipeline=1", "batch.micro_batch=1", "batch.global_batch=2"]
    words = [*toy, *layout, f"train.run_dir={tmp_path}/r", "train.save_lag_steps=0", *words]
    assert main(["train", "train_small", *words]) == 0
    saved = list((tmp_path / "r" / "checkpoints").glob("step_????????"))
    assert len(saved) == saves_between(load_run("train_small", words).train, 0, 9)


@pytest.mark.thorough
@pytest.mark.usefixtures("quick_submit")
def test_submit_refuses_a_long_run_on_synthetic_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "pretrain_1t", *ON_384_NODES, f"train.run_dir={tmp_path}/r", "data.train=synthetic"]
    assert main(words) == 2
    assert "data.allow_synthetic=true" in capsys.readouterr().err
    assert main([*words, "data.allow_synthetic=true"]) == 0
    assert "no limit of node-hours is set" in capsys.readouterr().err
    assert main([*words, "data.allow_synthetic=true", "--max-node-hours", "5000"]) == 0
    assert "ends when 5,000.0 node-hours are used" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.usefixtures("quick_submit")
def test_the_preview_says_nodes_minutes_node_hours_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SUBMIT_1T, f"train.run_dir={tmp_path}/r", "--time", "2:00:00"]) == 0
    err = capsys.readouterr().err
    assert re.search(
        r"this job takes 384 nodes for about 58 minutes, 373\.\d node-hours: 10 minutes to start \(assumed\), 5 steps",
        err,
    )
    assert f"this job writes no checkpoint (0 bytes), only logs and metrics, to {tmp_path}/r\n" in err
    # a run that saves nothing is not continued
    assert "at most 1 job of 2 h, 768 node-hours" in err and "no limit of node-hours is set" not in err
    production = ["submit", "pretrain_1t", *ON_384_NODES, f"train.run_dir={tmp_path}/p", *SYNTHETIC]
    assert main(production) == 0
    err = capsys.readouterr().err
    assert "for about 687 minutes" in err and "70 steps of about 580 s" in err
    # A checkpoint after every second step of 70, and one at the walltime. Each checkpoint has 12 bytes for each of
    # 1.008e12 parameters.
    assert (
        f"396.1 TiB, 36 checkpoints of 11.0 TiB, to {tmp_path}/p/checkpoints, and keeps 2 (train.keep_checkpoints)"
        in err
    )


def test_a_bare_sbatch_makes_the_same_checks(
    allocation: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train_1t", f"train.run_dir={tmp_path}/r")
    with pytest.raises(ConfigError, match=r"15259 steps on synthetic data take about [\d,]+ node-hours"):
        admit_job(open_batch(("pretrain_1t", WARNED, f"train.run_dir={tmp_path}/r", "data.train=synthetic")))
    with pytest.raises(ConfigError, match="GiB per device"):
        admit_job(open_batch((*words, "train.recompute=none", "batch.micro_batch=4")))
    capsys.readouterr()
    admit_job(open_batch(words))
    err = capsys.readouterr().err
    assert "5 steps of about 580 s" in err and "12 h" in err and "max_node_hours" not in err
    assert "384 nodes will import torch from" in err


def test_a_chain_pays_for_each_start_and_each_save() -> None:
    config = load_run("pretrain_1t", ["train.steps=3250"])
    cost = Cost(config, Path("r"), done=10, step_s=10.0, nodes=100, slice_hours=2.0, warning_s=600.0, chained=True)
    # each job spends ten minutes on the start, and ten minutes on the wait for its end
    assert cost.node_hours == 900.0 and cost.chain() == (6, 1200.0)
    # 2 h less the start and the warning time
    assert cost.job_steps == 600 and cost.job_saves == 301 and cost.job_minutes == 110
    assert replace(cost, slice_hours=0.1).chain() is None


def test_a_lead_time_shorter_than_a_step_is_pointed_out(
    allocation: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`sbatch slurm/train_1t.sbatch train.save_final=true` starts the same job as the command of this test. The
    benchmark's script warns the ranks 60 s before the walltime.
    """
    words = ("train_1t", f"train.run_dir={tmp_path}/r", "train.save_final=true")
    admit_job(open_batch((*words, "job.warning_s=60")))
    assert "warned 60 s before the end of the walltime, but a step takes about 580 s" in capsys.readouterr().err
    admit_job(open_batch((*words, WARNED)))
    assert "told to save" not in capsys.readouterr().err


@pytest.mark.parametrize(("words", "continuation"), [((), "never"), (("train.save_final=true",), "requeue")])
def test_a_run_that_saves_nothing_is_not_continued(
    allocation: None, tmp_path: Path, words: tuple[str, ...], continuation: str
) -> None:
    assert open_batch(("train_1t", f"train.run_dir={tmp_path}/r", *words)).job.continuation == continuation


def test_a_run_without_a_final_checkpoint_ends_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        f"train.run_dir={tmp_path}/r",
        "train.steps=2",
        "train.save_final=false",
        "model=gpt-tiny",
        "train.tensorboard=false",
    ]
    layout = ["parallel.tensor=1", "parallel.pipeline=1", "batch.micro_batch=1", "batch.global_batch=2"]
    assert main(["train", "train_small", *words, *layout, "optimizer.warmup_steps=0", "train.device=cpu"]) == 0
    assert run_dir.latest_step(tmp_path / "r") == 0 and len(run_dir.steps(tmp_path / "r")) == 2


def test_a_benchmark_that_is_stopped_saves_nothing_unless_it_saves_in_between(tmp_path: Path) -> None:
    words = [
        "train.steps=100000",
        "train.save_final=false",
        "model=gpt-tiny",
        "train.tensorboard=false",
        "train.device=cpu",
    ]
    layout = ["parallel.tensor=1", "parallel.pipeline=1", "batch.micro_batch=1", "batch.global_batch=2"]

    def saves(interval: int) -> bool:
        run = tmp_path / str(interval)
        stop = threading.Thread(target=stop_after_a_step, args=(run,), daemon=True)
        stop.start()
        assert (
            main(["train", "train_small", *words, *layout, f"train.run_dir={run}", f"train.save_interval={interval}"])
            == 75
        )
        stop.join()
        return run_dir.latest_step(run) > 0

    assert not saves(0) and saves(99999)


def stop_after_a_step(run: Path) -> None:
    while not run_dir.steps(run):
        time.sleep(0.02)
    (run / run_dir.STOP_FILE).touch()
