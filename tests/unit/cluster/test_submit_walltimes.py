"""The walltime and the warning time that `frontier-llm submit` requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster import slurm
from frontier_llm.cluster.admission import cost_problems
from frontier_llm.cluster.sites import load_site
from frontier_llm.cluster.submit import JobRequest, before_maintenance, wanted_job
from frontier_llm.cluster.warning_time import next_warning_s, save_seconds
from frontier_llm.config import load_run
from frontier_llm.planner.predict import START_S, PointPrediction, walltime_minutes
from frontier_llm.run import allocations, run_dir
from frontier_llm.run.allocations import Allocated
from tests.harness.checkpoints import save_only
from tests.harness.submissions import PRETRAIN_1T, SMALL


def test_lead_time_follows_the_measured_save(tmp_path: Path) -> None:
    frontier = load_site("frontier")
    assert next_warning_s(tmp_path, frontier) == 600
    assert next_warning_s(tmp_path, frontier, expected_step_s=576.0) == 600 + 2 * 576 + 18
    rows = [
        {"kind": "step", "step": 1, "loss": 1.0, "time": 100.0, "step_time_s": 30.0},
        {"kind": "save", "step": 1, "time": 190.0},
    ]
    rows += [
        {"kind": "step", "step": 2, "loss": 1.0, "time": 220.0, "step_time_s": 30.0},
        {"kind": "save", "step": 9, "time": 900.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert save_seconds(tmp_path) == [90.0]
    assert next_warning_s(tmp_path, frontier) == 300  # 2 x (30 + 90) + 60


@pytest.mark.thorough
def test_the_signal_leads_by_more_than_a_predicted_step(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*PRETRAIN_1T, "--nodes", "384", "--dry-run", f"train.run_dir={tmp_path}/r"]
    assert main(words) == 0
    (signal,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#SBATCH --signal")]
    assert int(signal.rpartition("@")[2]) > 600 + 2 * 500


@pytest.mark.thorough
def test_a_walltime_that_saving_would_eat_is_refused(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*PRETRAIN_1T, "--nodes", "384", "--dry-run", f"train.run_dir={tmp_path}/r"]
    assert main([*words, "--time", "0:30:00"]) == 2
    fix = capsys.readouterr().err.rpartition("--time ")[2].split()[0]
    assert main([*words, "--time", fix]) == 0


@pytest.mark.thorough
def test_a_way_out_lies_within_the_bin(fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On 64 nodes a step of ORNL's full batch takes nearly an hour, and a job of 64 nodes may run for two hours."""
    few = ["batch.micro_batch=8"]  # an eighth of the microbatches, which the certificate checks one by one
    words = [*PRETRAIN_1T, *few, "--nodes", "64", "--dry-run", f"train.run_dir={tmp_path}/r"]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "smaller batch.global_batch" in err and "--partition extended" in err and "from 92 nodes" in err
    assert main([*words, "batch.global_batch=1600"]) == main([*words, "--partition", "extended"]) == 0
    assert main([*words, "--time", "0"]) == 2


def test_a_job_gets_the_walltime_of_its_own_partition(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["data.train=synthetic", "data.allow_synthetic=true", "train.steps=10000000"]
    words = [*SMALL, "--nodes", "1", "--dry-run", *data, f"train.run_dir={tmp_path}/r"]
    for partition, walltime in (("batch", "02:00:00"), ("extended", "1-00:00:00")):
        assert main([*words, "--partition", partition]) == 0
        shown = capsys.readouterr()
        assert f"#SBATCH --time={walltime}\n" in shown.out and f"{walltime} per job" in shown.err


def request_of_10_hours(directory: Path) -> JobRequest:
    """Return a request on 384 nodes of Frontier.

    It needs ten hours: 60 steps of 400 s, times the safety factor of 1.5.
    """
    config = load_run("pretrain_1t", [f"train.run_dir={directory}", "train.steps=60"])
    site = load_site("frontier")
    predicted = PointPrediction(
        step_time_s=400.0, tokens_per_s=1.0, peak_bytes=1.0, limit_bytes=1.0, machine="frontier", band=0.17
    )
    return JobRequest(wanted_job(config, site, 384), config, site).with_prediction(predicted)


def test_the_walltime_is_what_the_run_needs(tmp_path: Path) -> None:
    """The walltime covers 1.5 times the simulated time, or the slow end of the prediction interval if it is longer. It
    is at most the site's limit for these nodes, and shorter if few steps remain.
    """
    request = request_of_10_hours(tmp_path)
    warning_s = request.job.warning_s
    assert request.job_s == START_S + 60 * 400 * 1.5
    assert request.slice_minutes == walltime_minutes(START_S + 36000 + warning_s) < 12 * 60
    wide = PointPrediction(400.0, 1.0, 1.0, 1.0, "frontier", band=0.56)
    assert request.with_prediction(wide).job_s == pytest.approx(START_S + 60 * 400 * 1.56)
    assert replace(request, job_s=1e6).slice_minutes == 12 * 60
    assert replace(request, minutes=75).slice_minutes == 75
    assert replace(request, job_s=0.0).slice_minutes == walltime_minutes(2 * warning_s)


def test_a_job_of_a_run_that_is_stopped_finished_or_out_of_budget_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start, a step of 400 s and a save take 384 nodes 256 node-hours (predicted)."""
    request = replace(request_of_10_hours(tmp_path), account="ABC123")
    assert list(cost_problems(request)) == []
    used = Allocated("7", 0, nodes=384, started_unix_s=0.0, seen_unix_s=3600 * 900 / 384)
    allocations.record(tmp_path, used)
    monkeypatch.setattr(slurm, "billed_node_hours", lambda job_ids: {})
    few = replace(request, job=replace(request.job, max_node_hours=1000.0))
    (problem,) = cost_problems(few)
    assert "100 of 1000 node-hours are left, which are too few" in problem.what
    assert list(cost_problems(replace(request, job=replace(request.job, max_node_hours=2000.0)))) == []
    (tmp_path / "STOP").touch()
    (problem,) = cost_problems(request)
    assert "STOP; delete the file to continue" in problem.what
    assert list(cost_problems(replace(few, job_tasks_per_node=8))) == []  # the supervisor of a running job decides
    (tmp_path / "STOP").unlink()
    save_only(tmp_path, 60)
    (problem,) = cost_problems(request)
    assert "finished: step 60 of 60" in problem.what and "larger train.steps" in problem.fix
    config = request.config
    config = config.model_copy(update={"train": config.train.model_copy(update={"save_final": False, "steps": 80})})
    run_dir.record(tmp_path, run_dir.Attempt(1, "7", ("n0",), 60, 80, 0, "finished"))
    (problem,) = cost_problems(replace(request, config=config))
    assert "without a final checkpoint" in problem.what and "train.save_final=true" in problem.fix


@pytest.mark.parametrize(
    ("hours_until", "minutes"),
    [(24.0, None), (6.0, 6 * 60 - 5), (0.3, None)],
    ids=["far away", "during the job", "too soon to train"],
)
def test_a_job_ends_before_a_maintenance(tmp_path: Path, hours_until: float, minutes: int | None) -> None:
    request = request_of_10_hours(tmp_path)
    maintenance = slurm.Maintenance("maint_1", 3600.0 * hours_until)
    shortened = before_maintenance(request, 0.0, maintenance)
    assert shortened.shortened_minutes == minutes
    assert before_maintenance(replace(request, minutes=600), 0.0, maintenance).shortened_minutes is None
    assert before_maintenance(request, 0.0, None) == request
    alone = replace(request, job=replace(request.job, continuation="never"))
    assert before_maintenance(alone, 0.0, maintenance) == alone
    train = request.config.train.model_copy(update={"save_interval": 0, "save_final": False})
    unsaved = replace(request, config=request.config.model_copy(update={"train": train}))
    assert before_maintenance(unsaved, 0.0, maintenance) == unsaved


@pytest.mark.thorough
def test_the_first_job_alone_is_shortened_and_a_successor_follows(
    fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        slurm, "next_maintenance", lambda now, nodes, partition: slurm.Maintenance("maint_1", now + 3600 * 6)
    )
    words = [*PRETRAIN_1T, "--nodes", "384", "--dry-run", "--json", f"train.run_dir={tmp_path}/r"]
    assert main(words) == 0
    shown = capsys.readouterr()
    submission = json.loads(shown.out)
    assert "--time=354" in submission["command"] or "--time=355" in submission["command"]
    assert "#SBATCH --time=12:00:00\n" in submission["script"]
    assert submission["job"]["continuation"] == "successor"
    assert "maintenance maint_1 begins at " in shown.err
