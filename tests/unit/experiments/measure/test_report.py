"""report.html is self-contained and complete. tests/docs/test_browser.py opens it in a real browser."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from frontier_llm.config import dump, load_run
from frontier_llm.errors import DataError
from frontier_llm.experiments.measure.predicted import beside_prediction
from frontier_llm.experiments.measure.report import _experts, write_report
from frontier_llm.experiments.measure.run_record import read_run
from frontier_llm.pages import Chart, figure
from frontier_llm.run.complete import digest_line
from frontier_llm.run.records import DamagedRecord
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.metrics import layout_of
from frontier_llm.units import format_seconds, strict_json

SAMPLE = "def f(x):\n    return x < 3 and x > 1  # <script>alert(1)</script>"


def make_run(directory: Path, *overrides: str) -> Path:
    config = load_run("quickstart", ["precision.dtype=bf16", *overrides])
    world = config.parallel.model_ranks * (config.parallel.data or 1)
    directory.mkdir()
    (directory / "config.yaml").write_text(dump(config))
    grid = vars(make_plan(config, world).grid)
    (directory / "plan.json").write_text(json.dumps({"grid": grid}))
    lines = [{"kind": "evaluation", "step": 0, "loss": 8.37, "bits_per_byte": 3.95}]
    for step in range(1, 41):
        values = {"loss": 8.0 - step / 10, "gradient_norm": 1.0, "learning_rate": 1e-3, "tokens_per_s": 9000.0 + step}
        lines.append({"kind": "step", "step": step, "consumed_tokens": 4096 * step, "skipped_steps": 0, **values})
    lines.append({"kind": "evaluation", "step": 40, "loss": 4.1, "bits_per_byte": 1.94})
    histogram = [0] * 6 + [5, 0, 3] + [0] * 31
    moved = {"calls": 8, "bytes": 3 << 20, "blocked_s": 0.001, "p50_us": 64, "p99_us": 256, "bins": histogram}
    lines.append(
        {
            "kind": "communication",
            "step": 40,
            "incarnation": 1,
            "rank": 0,
            "operations": {"dp reduce_scatter": moved, "dp all_gather": moved},
        }
    )
    torn = '{"kind": "step", "st'
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n" + torn)
    return directory


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("report")
    runs = [
        make_run(root / "first"),
        make_run(root / "second", "parallel.tensor=1", "parallel.data=2", "parallel.sequence_parallel=false"),
    ]
    return write_report(runs, root / "report.html", SAMPLE, "frontier-llm train quickstart train.steps=1000")


def test_the_page_needs_nothing_from_elsewhere(page):
    text = page.read_text().split("<script>")[0]  # the part before Plotly
    assert not re.findall(r'(?:src|href)="(?!#)[^"]+"', text)
    assert "alert(1)</script>" not in text, "the sample is text, not markup"
    # numbers of charts: curves, the difference of the losses, timelines, latencies
    assert text.count("class=figure>") == 4 + 1 + 2 + 2
    assert text.count("<div class=chart>") == text.count("class=figure>")


def test_a_curve_with_gaps_is_strict_json(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        row = {
            "step": 41,
            "loss": float("nan"),
            "gradient_norm": float("inf"),
            "learning_rate": 0.0,
            "tokens_per_s": 1.0,
        }
        line = {"kind": "step", "consumed_tokens": 1, "skipped_steps": 1, **row}
        file.write("\n" + strict_json(line, indent=None) + "\n")
    text = write_report([run], tmp_path / "report.html").read_text()
    drawings = re.findall(r'<script type="application/json" class=figure>(.*?)</script>', text)
    charts = [json.loads(drawing, parse_constant=lambda constant: pytest.fail(constant)) for drawing in drawings]
    assert charts[0]["data"][0]["y"][-1] is None and charts[0]["data"][0]["y"][0] == 7.9


def test_the_page_says_what_the_runs_did(page):
    text = page.read_text()
    for expected in (
        "4.100",
        "8.370 at step 0",
        "1.940",
        "TP2 x PP2 x DP1",
        "TP1 x PP2 x DP2",
        "layers 0-2",
        "train.steps=1000",
        "return x &lt; 3",
    ):
        assert expected in text, expected


def test_the_difference_of_two_losses_is_shown_by_run(page):
    """The first run is the reference. Curves are named by run, not by layout alone."""
    charts = [json.loads(chart) for chart in re.findall(r"class=figure>(.*?)</script>", page.read_text())]
    difference = charts[1]["data"]
    assert [trace["name"] for trace in difference] == ["second, TP1 x PP2 x DP2"]
    assert difference[0]["y"] == [0.0] * 40
    assert "Training loss minus that of first, TP2 x PP2 x DP1" in page.read_text()


def test_predicted_step_times_are_shown_beside_the_measured_ones(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        row = {"kind": "step", "step": 41, "step_time_s": 100.0, "loss": 4.0, "consumed_tokens": 1, "tokens_per_s": 1.0}
        file.write("\n" + json.dumps(row) + "\n")
    predicted = beside_prediction(run, "local")
    text = write_report([run], tmp_path / "report.html", machine="local").read_text()
    assert f"<td>{format_seconds(predicted.predicted_s)}</td><td>{format_seconds(100.0)}</td>" in text
    chart = next(json.loads(one) for one in re.findall(r"class=figure>(.*?)</script>", text) if '"measured"' in one)
    assert [trace["y"] for trace in chart["data"]] == [[predicted.predicted_s], [100.0]]


def test_tokens_of_each_source_and_a_change_of_blend_are_shown(tmp_path):
    run = make_run(tmp_path / "run")
    streams = [
        {
            "dataset": letter * 64,
            "path": f"data/{letter}",
            "dataset_tokens": 1000,
            "sequence_length": 100,
            "packing": "concatenate",
            "order": "0" * 16,
            "taken": 0,
        }
        for letter in "ab"
    ]

    def position(weights, taken):
        known = [{**stream, "taken": count} for stream, count in zip(streams, taken, strict=True)]
        blend = [{"stream": number, "weight": weight} for number, weight in enumerate(weights)]
        return {"streams": known, "blend": blend, "dealt": 0, "stretches": []}

    with (run / "metrics.jsonl").open("a") as file:
        for step, weights in ((0, (1, 1)), (10, (1, 1)), (20, (1, 3))):
            row = {"kind": "data", "step": step, "position": position(weights, (0, 0)), "global_batch": 1}
            file.write("\n" + json.dumps(row))
    checkpoint = run / "checkpoints" / "step_00000040"
    checkpoint.mkdir(parents=True)
    progress = {"step": 40, "position": position((1, 3), (15, 25))}
    content = json.dumps({"progress": progress, "shards": []}).encode()
    (checkpoint / "manifest.json").write_bytes(content)
    (checkpoint / "manifest.sha256").write_bytes(digest_line(content))

    text = write_report([run], tmp_path / "report.html").read_text()
    assert "<td>data/a</td><td>1.5K</td><td>1.5</td>" in text and "<td>data/b</td><td>2.5K</td><td>2.5</td>" in text
    assert "Tokens read by source" in text
    assert text.count('"text": "new blend"') == 4, "one label in each curve"


def test_results_of_evaluate_beside_the_run_are_drawn(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"kind": "tasks", "step": 40, "accuracy": {"piqa": 0.5}}) + "\n")
    (run / "evaluations").mkdir()
    for step, loss, accuracy in ((20, 6.5, 0.625), (10, 7.25, None)):
        result = {
            "held_out": [{"dataset": "data/web", "loss": loss}],
            "tasks": [{"task": "piqa", "acc": accuracy}, {"task": "boolq", "acc": accuracy}],
        }
        (run / "evaluations" / f"step_{step:08}.json").write_text(strict_json(result))
    text = write_report([run], tmp_path / "report.html").read_text()
    charts = [json.loads(chart) for chart in re.findall(r"class=figure>(.*?)</script>", text)]
    traces = {trace["name"]: (trace["x"], trace["y"]) for chart in charts for trace in chart["data"] if "name" in trace}
    layout = "TP2 x PP2 x DP1"
    assert traces[f"data/web (evaluate), {layout}"] == ([10, 20], [7.25, 6.5])
    assert traces[f"piqa (evaluate), {layout}"] == traces[f"boolq (evaluate), {layout}"] == ([20], [0.625])
    assert traces[f"piqa, {layout}"] == ([40], [0.5])
    (run / "evaluations" / "step_00000030.json").write_text("{")
    with pytest.raises(DamagedRecord, match="delete it; the checkpoint is then evaluated again"):
        write_report([run], tmp_path / "report.html")


def test_the_page_shows_the_latencies_of_each_axis(page):
    text = page.read_text()
    assert "<td>dp</td><td>reduce_scatter</td><td>8</td><td>3.0 MiB</td>" in text
    # each of the two operations occurs in both runs
    assert text.count("10 calls below 64 us") == 2 and text.count("6 calls below 256 us") == 2


def test_runs_of_one_layout_are_told_apart_by_their_names(tmp_path):
    (tmp_path / "deeper").mkdir()
    runs = [make_run(tmp_path / "warm"), make_run(tmp_path / "cold")]
    text = write_report(runs, tmp_path / "report.html").read_text()
    # Each run's name is in the legend of each figure.
    counts = [text.count(f'"name": "{name}, TP2 x PP2 x DP1"') for name in ("warm", "cold")]
    assert counts == [4, 5], "the difference of the losses is a curve of the second run"
    runs.append(make_run(tmp_path / "deeper" / "cold"))
    assert f'"name": "{runs[2]}, TP2 x PP2 x DP1"' in write_report(runs, tmp_path / "report.html").read_text()


def keep_steps(run: Path, first: int) -> Path:
    """Remove the recorded steps before `first`, as in a fork of a run."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    path.write_text("\n".join(json.dumps(row) for row in rows if row["kind"] != "step" or row["step"] >= first) + "\n")
    return run


@pytest.mark.parametrize(("first", "drawn"), [(40, False), (39, True)])
def test_a_difference_at_one_step_is_not_drawn(tmp_path, first, drawn):
    runs = [make_run(tmp_path / "run"), keep_steps(make_run(tmp_path / "fork"), first)]
    assert ("Training loss minus that of run" in write_report(runs, tmp_path / "report.html").read_text()) == drawn


def test_changes_at_one_step_share_a_label(tmp_path):
    runs = []
    for name in ("one", "two"):
        run = make_run(tmp_path / name)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        for step, words in ((0, []), (20, ["parallel.tensor=1", "parallel.sequence_parallel=false"])):
            layout = layout_of(load_run("quickstart", words), 4)
            lines.insert(step, json.dumps({"kind": "start", "step": step, "incarnation": step, "layout": layout}))
        (run / "metrics.jsonl").write_text("\n".join(lines))
        runs.append(run)
    text = write_report(runs, tmp_path / "report.html").read_text()
    charts = [json.loads(chart) for chart in re.findall(r"class=figure>(.*?)</script>", text)]
    (label,) = charts[0]["layout"]["annotations"]
    assert (label["x"], label["text"]) == (20, "TP1 x PP2 x DP2, one; TP1 x PP2 x DP2, two")


@pytest.mark.parametrize(
    ("highest", "labels"), [(230.0, ["10", "20", "50", "100", "200"]), (60.0, ["3", "4", "5", "7", "10"]), (25.0, [])]
)
def test_a_logarithmic_axis_has_labels_with_complete_numbers(highest, labels):
    """Plotly would label 20 as 2 if the axis has less than a decade."""
    traces = [{"x": [1, 2], "y": [9.5, highest]}]
    drawn = figure(Chart("t", "x", "y", traces, log_y=True))
    axis = json.loads(re.search(r"class=figure>(.*?)</script>", drawn)[1])["layout"]["yaxis"]
    assert axis.get("ticktext", [])[3:8] == labels


def test_a_run_that_changed_its_layout_has_each_part_labelled(tmp_path):
    before = ["parallel.tensor=1", "parallel.data=2", "parallel.sequence_parallel=false", "batch.micro_batch=2"]
    # The rule that `comm.tensor_chunks` needs tensor parallelism applies to the last attempt's configuration, not to
    # the attempt before.
    run = make_run(tmp_path / "run", "comm.tensor_chunks=2")
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    starts = [
        json.dumps(
            {
                "kind": "start",
                "step": step,
                "incarnation": number,
                "layout": layout_of(load_run("quickstart", overrides), 4),
            }
        )
        for number, step, overrides in ((1, 0, before), (2, 30, []))
    ]
    place = next(index for index, line in enumerate(lines) if '"step": 31' in line)
    path.write_text("\n".join([starts[0], *lines[:place], starts[1], *lines[place:]]) + "\n")
    text = write_report([run], tmp_path / "report.html").read_text()
    assert "Layout after step 0: TP1 x PP2 x DP2, 1f1b, 4 microbatches" in text
    assert "Layout after step 30: TP2 x PP2 x DP1, 1f1b, 4 microbatches, sequence parallel" in text
    # in each figure: a label at the change, and an entry in the legend
    assert text.count('"text": "TP2 x PP2 x DP1"') == text.count('"name": "2 layouts"') == 4
    assert "<b>9,036</b><span>tokens/s (median since step 30)" in text
    assert "<td>TP1 x PP2 x DP2, then TP2 x PP2 x DP1</td>" in text
    assert "Communication TP1 x PP2 x DP2" in text  # the first attempt recorded this communication


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_layout_with_context_parallelism_is_read(tmp_path, replicas):
    words = ["parallel.tensor=1", "parallel.pipeline=1", "parallel.context=2", "parallel.sequence_parallel=false"]
    run = make_run(tmp_path / "run", *words, f"parallel.data={replicas}")
    layout = layout_of(load_run(str(run / "config.yaml")), 2 * replicas)
    path = run / "metrics.jsonl"
    path.write_text(
        json.dumps({"kind": "start", "step": 0, "incarnation": 1, "layout": layout}) + "\n" + path.read_text()
    )
    (part,) = read_run(run).parts
    assert (part.plan.grid.cp, part.plan.grid.dp) == (2, replicas)
    assert part.plan.microbatches == 4 // replicas


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"not a run directory: it lacks config\.yaml, plan\.json, metrics\.jsonl"):
        write_report([tmp_path], tmp_path / "report.html")


def test_the_load_of_experts_is_drawn_where_there_are_any() -> None:
    routing = {
        "rows_per_expert": [5, 3],
        "largest_over_mean": [1.25, 1.5],
        "smallest_over_mean": [0.75, 0.5],
        "entropy": [0.6, 0.4],
    }
    record = SimpleNamespace(name="moe", steps=[{"step": 1, "routing": routing}, {"step": 2}])
    page = _experts([record])  # type: ignore[list-item]
    dense = SimpleNamespace(name="dense", steps=[{"step": 1}])
    assert "Busiest expert" in page and "1.5" in page and _experts([dense]) == ""  # type: ignore[list-item]


PLUGIN = """
from frontier_llm import schedule

schedule.register("of-a-plugin", schedule.rule("1f1b"))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words", [["report"], ["plan", "--machine=local", "--measured"]], ids=["report", "plan --measured"]
)
def test_a_run_with_a_plugins_schedule_is_read(tmp_path, words):
    """The commands run in their own processes, because a registration cannot be undone."""
    run = make_run(tmp_path / "run", "parallel.tensor=1")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            "\n"
            + json.dumps(
                {"kind": "step", "step": 41, "step_time_s": 1.0, "loss": 1.0, "consumed_tokens": 1, "tokens_per_s": 1.0}
            )
            + "\n"
        )
    (tmp_path / "mine.py").write_text(PLUGIN)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["parallel"]["schedule"], config["plugins"] = "of-a-plugin", ["../mine.py"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "frontier_llm.cli.main", *words, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (tmp_path / "mine.py").rename(tmp_path / "elsewhere.py")
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "needs the plugin mine.py" in refused.stderr and "--plugin" in refused.stderr
    (tmp_path / "given").mkdir()
    (tmp_path / "elsewhere.py").rename(tmp_path / "given" / "mine.py")
    given = subprocess.run(
        [*command, "--plugin", str(tmp_path / "given" / "mine.py")], capture_output=True, text=True, check=False
    )
    assert given.returncode == 0, given.stderr
