from __future__ import annotations

import csv
import io
import json
import re
import statistics
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster.sites import load_site
from frontier_llm.config import load_run
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.experiments.scaling.figure import charts, write_report
from frontier_llm.experiments.scaling.forecast import simulated_rows
from frontier_llm.experiments.scaling.harvest import Row, as_csv, half_width, harvest, with_efficiency
from frontier_llm.experiments.scaling.series import Point, announce, make_series
from frontier_llm.planner.predict import predict
from frontier_llm.planner.published import PUBLISHED
from frontier_llm.run import run_dir

LOCAL = load_site("local")
FRONTIER = load_site("frontier")


def points(root: Path, nodes: list[int], repeats: int = 1) -> list[Point]:
    config = load_run("train_small", ["train.steps=8"])
    return make_series("weak", config, LOCAL, nodes, 16, root, repeats)


def finish(point: Point, step_time_s: float, steps: int = 8) -> None:
    announce(point)
    rows = [
        {"kind": "step", "step": step, "loss": 1.0, "step_time_s": 9.0 if step <= 3 else step_time_s}
        for step in range(1, steps + 1)
    ]
    (point.directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_throughput_efficiency_and_interval(tmp_path: Path) -> None:
    small = points(tmp_path, [1, 2], repeats=3)[:3]
    large = points(tmp_path, [1, 2], repeats=3)[3:]
    for point, seconds in zip([*small, *large], [1.0, 1.0, 1.0, 1.0, 1.25, 1.6], strict=True):
        finish(point, seconds)
    first, second = harvest(tmp_path)
    tokens = small[0].config.batch.global_batch * small[0].config.model.sequence_length
    assert first.tokens_per_s == pytest.approx(tokens)  # warm-up steps of 9 s do not count
    assert (first.efficiency, first.ci95_percent, first.repeats, first.steps) == (1.0, 0.0, 3, 15)
    rates = [2 * tokens / seconds for seconds in (1.0, 1.25, 1.6)]
    mean = statistics.fmean(rates)
    assert second.tokens_per_s == pytest.approx(mean)
    assert second.efficiency == pytest.approx(mean / 2 / tokens)
    assert second.ci95_percent == pytest.approx(100 * 4.303 * statistics.stdev(rates) / 3**0.5 / mean)


def test_half_width_of_a_known_sample() -> None:
    assert half_width([1.0, 3.0]) == pytest.approx(12.706)  # mean 2, standard error 1, one degree of freedom


def test_failed_and_unfinished_points_stay_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, broken, never = points(tmp_path, [1, 2, 4])
    finish(done, 1.0)
    finish(broken, 1.0, steps=2)
    run_dir.record(
        broken.directory, run_dir.Attempt(1, "7", ("n0",), 0, 0, 1, "crash", "rank 5 on n0 failed first: Killed")
    )
    announce(never)
    rows = harvest(tmp_path)
    assert [row.status for row in rows] == [
        "ok",
        "failed: rank 5 on n0 failed first: Killed",
        "incomplete: 0 of 8 steps",
    ]
    assert [row.efficiency for row in rows] == [1.0, None, None]
    assert main(["scaling", "report", str(tmp_path)]) == 1
    assert "failed: rank 5" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("scaling.*")} == {"scaling.csv", "scaling.json", "scaling.html"}
    assert len(list(csv.DictReader(io.StringIO((tmp_path / "scaling.csv").read_text())))) == 3


def test_repeats_that_fail_are_counted(tmp_path: Path) -> None:
    first, second = points(tmp_path, [1], repeats=2)
    finish(first, 1.0)
    announce(second)
    (row,) = harvest(tmp_path)
    assert row.repeats == 1 and "1 of 2 repeats" in row.status and row.tokens_per_s is not None


def test_nothing_to_harvest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no runs of a scaling series"):
        harvest(tmp_path)
    (tmp_path / "point.json").write_text("{")
    with pytest.raises(DataError, match="run the point again"):
        harvest(tmp_path)


def simulated(root: Path) -> list[Row]:
    config = load_run("train_175b", ["train.steps=20"])
    return simulated_rows(make_series("strong", config, FRONTIER, [8, 16, 128], 8000, root))


def test_simulated_rows_say_so_and_fall_with_fewer_microbatches(tmp_path: Path) -> None:
    rows = simulated(tmp_path)
    assert {row.kind for row in rows} == {"simulated"} and {row.repeats for row in rows} == {0}
    efficiencies = [row.efficiency for row in rows]
    assert efficiencies[0] == 1.0 and efficiencies == sorted(efficiencies, reverse=True) and efficiencies[-1] > 0.5
    assert list(tmp_path.iterdir()) == []


def test_series_of_different_kind_do_not_share_a_base(tmp_path: Path) -> None:
    rows = simulated(tmp_path)
    measured = [Row(**{**vars(rows[1]), "kind": "measured", "tokens_per_s_per_device": 1.0, "efficiency": None})]
    assert with_efficiency([*rows, *measured])[-1].efficiency == 1.0


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = load_run("train_1t", ["parallel.tensor=8", "parallel.pipeline=4"])
    (problem,) = predict(config, 256, "frontier").memory_problems()
    assert "GiB per device" in problem.what and "recompute=full" in problem.fix
    assert predict(load_run("train_1t"), 3072, "frontier").memory_problems() == []
    with pytest.raises(ConfigError, match="GiB per device"):
        simulated_rows(make_series("weak", config, FRONTIER, [4], 1600, tmp_path))
    assert predict(load_run("train_1t"), 3072).tokens_per_s > 0


def test_the_page_is_self_contained_and_marks_what_is_simulated(tmp_path: Path) -> None:
    rows = simulated(tmp_path)
    broken = Row(**{**vars(rows[0]), "nodes": 4, "status": "failed: <b>oom</b>", "tokens_per_s": None})
    text = write_report([*rows, broken], tmp_path / "out")[2].read_text()
    assert not re.search(r'(src|href)="(?!#)', text.split("<script>")[0])
    assert text.count("<tr class=simulated>") == 4 and "arXiv 2312.12705" in text
    assert "failed: &lt;b&gt;oom" in text and "<b>oom" not in text
    assert text.count("class=chart") == 2 and '"name": "ORNL 1T, batch 8016 (published)"' in text
    assert as_csv(rows).splitlines()[0].startswith("mode,model,site,kind,status,nodes,devices")


def test_the_axis_of_efficiencies_begins_just_below_the_lowest(tmp_path: Path) -> None:
    """On an axis that begins at 0, two weak scaling curves near 100 % would look like one line."""
    chart = list(charts(simulated(tmp_path)))[1]
    bottom, top = chart.layout["yaxis"]["range"]
    values = [value for trace in chart.traces for value in trace["y"]]
    assert 0.8 * min(values) < bottom < min(values) and max(values) < top


def test_published_points() -> None:
    assert {(point.mode, point.devices, point.efficiency) for point in PUBLISHED} == {
        ("weak", 1024, 1.0),
        ("weak", 3072, 1.0),
        ("strong", 1024, 0.8993),
        ("strong", 3072, 0.8705),
    }


def test_a_predicted_series_stands_beside_the_published_point(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["scaling", "strong", "--model", "gpt-175b", "--nodes", "8,128", "--site", "frontier", "--simulate"]
    assert main([*words, "--dry-run", "--output", str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "measured" in line]
    assert "1024 devices: 89.9 % measured" in line and "96.5 % predicted (+6.6 points)" in line
    assert "leaves out contention" in line


def test_submit_refuses_a_layout_that_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [
        "submit",
        "train_1t",
        "--site",
        "frontier",
        "-A",
        "X",
        "--nodes",
        "4",
        "--dry-run",
        "parallel.pipeline=4",
        "batch.global_batch=8",
    ]
    assert main([*words, f"train.run_dir={tmp_path}/r"]) == 2
    assert "GiB per device" in capsys.readouterr().err
