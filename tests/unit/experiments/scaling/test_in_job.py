"""A series inside one allocation: the order of its points, dead nodes, the end of the walltime, and the predictions of
a dry run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster import submit
from frontier_llm.cluster.sites import load_site
from frontier_llm.config import load_run
from frontier_llm.errors import ConfigError, FrontierError
from frontier_llm.experiments.scaling import launch
from frontier_llm.experiments.scaling.forecast import Forecast, forecasts
from frontier_llm.experiments.scaling.harvest import WARMUP_STEPS
from frontier_llm.experiments.scaling.in_job import run_series, waves
from frontier_llm.experiments.scaling.launch import RunEnd, ShortRun
from frontier_llm.experiments.scaling.series import make_series
from frontier_llm.experiments.scaling.walltime import FEWEST_STEPS, steps_of
from frontier_llm.run import run_dir
from frontier_llm.run.failure import Evidence, Failure


def priced(root: Path, nodes: list[int], repeats: int = 1) -> list[Forecast]:
    points = make_series("weak", load_run("train_small"), load_site("local"), nodes, 16, root, repeats)
    return forecasts([(steps_of(point, None), None) for point in points])


def sizes(rows: list[list[Forecast]]) -> list[list[int]]:
    return [[row.point.nodes for row in wave] for wave in rows]


def test_the_baseline_is_alone_and_the_others_may_share_the_allocation(tmp_path: Path) -> None:
    rows = priced(tmp_path, [1, 2, 4], repeats=2)
    assert sizes(waves(rows, 4, side_by_side=False)) == [[1], [1], [2], [2], [4], [4]]
    assert sizes(waves(rows, 4, side_by_side=True)) == [[1], [1, 2], [2], [4], [4]]
    assert rows[0].point.config.train.steps == FEWEST_STEPS


class FourNodes:
    """An allocation whose n1 fails in the first run that uses it."""

    def __init__(self, left_s: float = 1e9) -> None:
        self.nodes = 4
        self.left_s = left_s
        self.bad = set[str]()
        self.starts = list[tuple[str, tuple[str, ...]]]()

    def time_left_s(self) -> float:
        return self.left_s

    @contextmanager
    def borrow(self, count: int) -> Iterator[tuple[str, ...]]:
        usable = tuple(node for node in ("n0", "n1", "n2", "n3", "n4") if node not in self.bad)
        if len(usable) < count:
            raise FrontierError("too few nodes")
        yield usable[:count]

    def start_on(self, nodes: tuple[str, ...], run: ShortRun, limit_s: float) -> RunEnd:
        self.starts.append((run.directory.name, nodes))
        if "n1" in nodes:
            self.bad.add("n1")
            return RunEnd(
                1.0, 1, Failure("n1 failed", Evidence.ENDS, "node failure", host="n1", host_suspect=True), True
            )
        finish_steps(run)
        return RunEnd(1.0, 0, None, True)


def finish_steps(run: ShortRun) -> None:
    rows = [
        {"kind": "step", "step": step, "loss": 1.0, "step_time_s": 1.0} for step in range(1, run.config.train.steps + 1)
    ]
    (run.directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def words_of(row: Forecast) -> tuple[str, ...]:
    own = (f"batch.global_batch={row.point.config.batch.global_batch}", f"train.steps={row.point.config.train.steps}")
    return ("train_small", *own, f"train.run_dir={row.point.directory}")


def test_a_point_whose_node_dies_runs_again_on_a_spare(tmp_path: Path) -> None:
    allocation = FourNodes()
    run_series(priced(tmp_path, [1, 2, 4]), allocation, words_of)  # type: ignore[arg-type]
    assert [(name[-5:-3], nodes) for name, nodes in allocation.starts] == [
        ("01", ("n0",)),
        ("02", ("n0", "n1")),
        ("02", ("n0", "n2")),
        ("04", ("n0", "n2", "n3", "n4")),
    ]


def test_the_only_output_of_json_is_the_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = FourNodes()
    ranks.site = load_site("local")  # type: ignore[attr-defined]
    ranks.allocation = SimpleNamespace(nodes=["n0", "n2", "n3", "n4"])  # type: ignore[attr-defined]
    words = ("train_small", *launch.BARE, "batch.micro_batch=1")
    tool = SimpleNamespace(ranks=ranks, overrides=words[1:], job=SimpleNamespace(words=words))
    monkeypatch.setattr(launch, "open_tool_job", lambda *args, **settings: tool)
    command = ["scaling", "weak", "--run", "train_small", "--nodes", "1", "--batch-per-replica", "16", "--in-job"]
    command += ["--json", "--output", str(tmp_path)]
    assert main([*command, "--dry-run"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)
    assert planned["predicted_step_s"] > 0 and ranks.starts == []
    assert main(command) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["status"] == "ok" and row["steps"] == FEWEST_STEPS - WARMUP_STEPS


@pytest.mark.parametrize("option", ["--spares=2", "--preflight", "--side-by-side"])
def test_an_option_of_a_series_in_a_job_is_refused_outside(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scaling", "strong", "--model", "gpt-175b", "--nodes", "64", "--site", "frontier", "--simulate", option]
    assert main(words) == 2 and "add --in-job" in capsys.readouterr().err


def test_what_the_walltime_leaves_no_room_for_stays_in_the_table(tmp_path: Path) -> None:
    allocation = FourNodes(left_s=60.0)
    run_series(priced(tmp_path, [1, 2]), allocation, words_of)  # type: ignore[arg-type]
    assert allocation.starts == [] and len(list(tmp_path.glob("*/point.json"))) == 2


def test_a_dry_run_prices_every_point(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "scaling",
        "strong",
        "--model",
        "gpt-175b",
        "--nodes",
        "64,128",
        "--site",
        "frontier",
        "-A",
        "ABC1",
        "--dry-run",
    ]
    assert main([*words, "--json"]) == 0
    text = capsys.readouterr()
    rows = json.loads(text.out)
    assert [row["nodes"] for row in rows] == [64, 128] and rows[0]["predicted_efficiency"] == 1.0
    assert 0.95 < rows[1]["predicted_efficiency"] < 1.0 and rows[1]["predicted_step_s"] == pytest.approx(
        rows[0]["predicted_step_s"] / 2, rel=0.1
    )
    for row in rows:
        assert row["predicted_node_hours"] == pytest.approx(
            row["nodes"] * (600 + row["steps"] * row["predicted_step_s"]) / 3600
        )
        assert (
            row["predicted_node_hours"] < row["nodes"] * row["minutes"] / 60
            and row["peak_gib"] < row["limit_gib"] == 64
        )
    assert "node-hours predicted, including the start of each job" in text.err
    assert main(words) == 0 and "of 64" in capsys.readouterr().out


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[submit.JobRequest]:
    """Return the requests of the jobs that commands have queued."""
    requests: list[submit.JobRequest] = []

    def queue(request: submit.JobRequest) -> submit.Submission:
        requests.append(request)
        return submit.Submission("", (), tmp_path)

    monkeypatch.setattr(submit, "submit", queue)
    return requests


def submit_weak(run: str, batch: int, root: Path) -> int:
    words = ["scaling", "weak", "--run", run, "--nodes", "1,2", "--site", "local", "--batch-per-replica", str(batch)]
    return main([*words, "--output", str(root)])


def test_a_point_saves_and_evaluates_nothing(queued: list[submit.JobRequest], tmp_path: Path) -> None:
    """As in a trial of `tune`, only steps are measured, without saves and evaluations between them."""
    run = tmp_path / "run.yaml"
    run.write_text("base: train_small\ndata: {validation: synthetic}\ntrain: {eval_interval: 4}\n")
    assert submit_weak(str(run), 16, tmp_path) == 0
    configs = [request.config for request in queued]
    assert len(configs) == 2 and not any(
        config.train.save_interval or config.train.save_final or config.train.eval_interval for config in configs
    )
    assert [config.data.validation for config in configs] == [None, None]


def test_a_repeated_series_runs_what_is_not_measured_and_refuses_another_batch(
    queued: list[submit.JobRequest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_weak("train_small", 16, tmp_path) == 0
    first, second = (request.job.directory for request in queued)
    run_dir.record(first, run_dir.Attempt(1, "7", ("n0",), 0, 20, 0, "finished"))
    run_dir.record(second, run_dir.Attempt(1, "8", ("n0",), 0, 4, 1, "crash"))
    assert submit_weak("train_small", 16, tmp_path) == 0
    assert [request.job.directory for request in queued] == [first, second, second]
    announced = (first / "point.json").read_text()
    assert submit_weak("train_small", 32, tmp_path) == 2
    assert capsys.readouterr().err.count("another --output, or delete the directory") == 2
    assert len(queued) == 3 and (first / "point.json").read_text() == announced


def with_steps(directory: Path, steps: int) -> str:
    """Change the steps in a point.json, as another walltime or a calibration would. Return the text of the file."""
    path = directory / "point.json"
    content = json.loads(path.read_text())
    content["steps"] = content["config"]["train"]["steps"] = steps
    path.write_text(json.dumps(content))
    return path.read_text()


def test_a_repeated_series_keeps_points_with_another_number_of_steps(
    queued: list[submit.JobRequest], tmp_path: Path
) -> None:
    """Regression: measured points were refused after a change of --time. The second point was ended at its time limit
    after its last step, so no finished start is recorded.
    """
    assert submit_weak("train_small", 16, tmp_path) == 0
    first, second = (request.job.directory for request in queued)
    before = [with_steps(directory, 8) for directory in (first, second)]
    run_dir.record(first, run_dir.Attempt(1, "7", ("n0",), 0, 8, 0, "finished"))
    rows = [{"kind": "step", "step": step, "loss": 1.0, "step_time_s": 1.0} for step in range(1, 9)]
    (second / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert submit_weak("train_small", 16, tmp_path) == 0
    assert len(queued) == 2
    assert [(directory / "point.json").read_text() for directory in (first, second)] == before
    (second / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert submit_weak("train_small", 16, tmp_path) == 0
    assert [request.job.directory for request in queued] == [first, second, second]


def test_a_refused_submission_does_not_change_the_point_of_the_queued_job(
    queued: list[submit.JobRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submit_weak("train_small", 16, tmp_path) == 0
    before = with_steps(queued[0].job.directory, 8)

    def refuse(request: submit.JobRequest) -> submit.Submission:
        raise ConfigError("a job is queued")

    monkeypatch.setattr(submit, "submit", refuse)
    assert submit_weak("train_small", 16, tmp_path) == 2
    assert (queued[0].job.directory / "point.json").read_text() == before


def test_a_layout_that_does_not_fit_is_refused_before_anything_is_queued(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = load_run("train_175b", ["parallel.pipeline=4", "train.recompute=none", "machine=frontier"])
    points = make_series("strong", config, load_site("frontier"), [64, 128], 8000, tmp_path)
    with pytest.raises(ConfigError) as caught:
        forecasts([(point, None) for point in points])
    assert [problem.where for problem in caught.value.problems] == ["64 nodes: memory", "128 nodes: memory"]
    words = [
        "scaling",
        "strong",
        "--model",
        "gpt-175b",
        "--nodes",
        "64",
        "--site",
        "frontier",
        "-A",
        "ABC1",
        "--dry-run",
    ]
    assert (
        main([*words, "parallel.pipeline=4", "train.recompute=none"]) == 2
        and "64 nodes: memory" in capsys.readouterr().err
    )
    assert (
        main(["scaling", "strong", "--model", "gpt-175b", "--nodes", "64"]) == 2
        and "--site frontier" in capsys.readouterr().err
    )
