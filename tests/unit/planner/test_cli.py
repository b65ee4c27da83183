"""The command `frontier-llm plan`: its reports, its files and its messages for bad input. It must not import torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from frontier_llm.blueprint.optimizers import ADAMW, state_bytes
from frontier_llm.blueprint.parameters import model_parameters, total_parameters
from frontier_llm.checkpoint.manifest import ITEM_BYTES
from frontier_llm.cli.main import main
from frontier_llm.cluster import sites
from frontier_llm.config import load_model
from frontier_llm.config.load import load_run
from frontier_llm.planner import report
from frontier_llm.planner.choice import why_not
from frontier_llm.planner.figures import simulated_part
from frontier_llm.topology.plan import make_plan
from tests.harness.plan_command import plan as run


def test_a_plan_says_what_how_fast_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        "gpt-22b",
        "--nodes",
        "8",
        "batch.global_batch=512",
        "--explain",
        "--allow-cross-node-tp",
        "--what-if",
        "micro_batch=1",
    )
    assert code == 0
    for words in (
        "choice: TP",
        "runner-up:",
        "legal layouts",
        "MFU",
        "HFU",
        "node-hours",
        "checkpoint every",
        "queue: bin 5",
        "across nodes: TP16",
        "what if micro_batch=1",
        "[measured]",
        "[published]",
        "[estimated]",
        "simulated",
    ):
        assert words in out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "nodes"),
    [("gpt-22b", "8"), ("llama-2-70b", "64"), ("mpt-13b", "16"), ("gpt-175b", "128")],
)
def test_how_many_plans_are_shown_does_not_change_the_choice(
    model: str,
    nodes: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = {top: json.loads(run(capsys, model, "--nodes", nodes, "--json", "--top", top)[1]) for top in ("1", "8")}
    assert len(shown["1"]["plans"]) == 1 < len(shown["8"]["plans"])
    assert shown["1"]["plans"][0] == shown["8"]["plans"][0]
    assert shown["1"]["promise"] == shown["8"]["promise"]


def test_the_exchange_of_keys_and_values_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "mpt-30b", "--nodes", "8", "--fix", "context=2", "--explain")
    assert code == 0 and "cp communication" in out


def test_what_else_is_shown_does_not_change_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("gpt-22b", "--nodes", "8", "--json")
    plain = json.loads(run(capsys, *asked)[1])["plans"]
    shown = (
        "--explain",
        "--what-if",
        "micro_batch=1",
        "--what-if",
        "schedule=gpipe",
        "--chrome-trace",
        f"{tmp_path}/t.json",
        "--figures",
        f"{tmp_path}/p.html",
    )
    assert json.loads(run(capsys, *asked, *shown)[1])["plans"] == plain


def test_json_is_complete_and_files_are_usable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emitted = tmp_path / "runs" / "mine.yaml"
    trace = tmp_path / "trace.json"
    figures = tmp_path / "plan.html"
    code, out, err = run(
        capsys,
        "gpt-22b",
        "--nodes",
        "8",
        "batch.global_batch=512",
        "--json",
        "--emit",
        str(emitted),
        "--chrome-trace",
        str(trace),
        "--figures",
        str(figures),
    )
    assert code == 0
    report = json.loads(out)
    best = report["plans"][0]
    assert report["devices"] == 64
    assert sum(best["breakdown_s"].values()) == pytest.approx(best["step_s"], rel=1e-6)
    config = load_run(str(emitted))
    plan = make_plan(config, 64)
    assert (plan.grid.tp, plan.grid.pp, plan.microbatches) == (best["tensor"], best["pipeline"], best["microbatches"])
    assert config.train.recompute == best["recompute"]
    assert f"frontier-llm submit {emitted} --site frontier --nodes 8" in err
    assert [one["operation"] for one in best["collectives"]] == ["reduce_scatter", "all_gather"]
    assert "sbatch" in err
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in events} == set(range(best["pipeline"]))
    page = figures.read_text().split("<script>")[0]
    # Numbers of charts: pipeline, causes, memory and roofline; then throughput, scaling, collectives.
    assert page.count("class=chart") == 5 + 3 + 2 + 2
    assert "Parts of a step&#x27;s time" in page and "why not FSDP: " in page
    assert '"name": "idle"' in page and "Report" in page
    assert "http" not in page.split("<pre>")[0]


@pytest.mark.parametrize(
    ("simulated", "words"),
    [(8, ""), (4, ": 4 of the 8 microbatches; the pattern in the middle repeats")],
)
def test_a_pipeline_that_is_drawn_in_part_says_so(simulated: int, words: str) -> None:
    schedule = SimpleNamespace(microbatches=simulated)
    plan = SimpleNamespace(
        layout=SimpleNamespace(microbatches=8),
        simulated=SimpleNamespace(timeline=SimpleNamespace(schedule=schedule)),
    )
    assert simulated_part(plan) == words  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [80, 140])
def test_the_report_fits_the_terminal(
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(
        capsys,
        "gpt-22b",
        "--nodes",
        "8",
        "batch.global_batch=512",
        "--explain",
        "--allow-cross-node-tp",
        "--what-if",
        "micro_batch=1",
    )
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    assert "bound by" in out


def test_a_fixed_choice_is_refused_with_the_rule_that_it_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "gpt-22b", "--nodes", "16", "batch.global_batch=512", "--fix", "tensor=5")
    assert code == 2
    assert "attention heads, 48, is not divisible by tensor 5\n    fix: set parallel.tensor to one of [2, 4, 8]" in err
    assert err.count("no legal layout") == 1


def test_what_if_names_the_rule_that_a_value_breaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # no line is wrapped
    asked = ("gpt-22b", "--nodes", "4", "batch.global_batch=1000")
    code, out, _ = run(capsys, *asked, "--what-if", "micro_batch=3")
    assert code == 0
    assert "no legal layout; batch.global_batch: 1000 is not a multiple of micro_batch 3 x dp 4 = 12" in out
    code, _, err = run(capsys, *asked, "--fix", "micro_batch=3")
    assert code == 2
    assert "batch.global_batch: 1000 is not a multiple of micro_batch 3" in err


def plan_of(step_s: float, **risks: object) -> SimpleNamespace:
    return SimpleNamespace(
        step_s=step_s,
        tight=risks.get("tight", False),
        layout=SimpleNamespace(sharding=risks.get("sharding", "optimizer")),
        simulated=None,
    )


@pytest.mark.parametrize(
    ("risks", "said"),
    [
        ({"tight": True}, "it fills memory to within 5 %, so it must be faster by 3 % to be chosen"),
        ({"sharding": "weights"}, "its overlap is an estimate, so it must be faster by 3 % to be chosen"),
    ],
)
def test_a_faster_runner_up_is_told_what_decided(risks: dict[str, object], said: str) -> None:
    assert why_not(plan_of(1.0), plan_of(0.99, **risks), []) == said  # type: ignore[arg-type]


def test_numbers_read_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert (report._days(64.46), report._days(10176.8)) == ("64.5", "10,177")
    assert (report._node_hours(0.123), report._node_hours(10176.8)) == ("0.12", "10,177")
    _, out, _ = run(capsys, "gpt-22b", "--nodes", "8", "batch.global_batch=512", "--top", "1")
    assert re.search(r"dominated; \d+ finalists simulated", " ".join(out.split()))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gpt-23b", "--nodes", "8"], "did you mean 'gpt-22b'"),
        (["gpt-22b", "--machine", "fronteir"], "did you mean 'frontier'"),
        (["gpt-1t", "--nodes", "2"], "use at least 64 nodes"),
        (["gpt-1t", "--nodes", "383", "batch.global_batch=9600"], "or 384 nodes"),
        (
            ["gpt-22b", "--nodes", "8", "--fix", "tensor=7"],
            "with tensor=7\n    fix: use another number of nodes, or fix fewer choices",
        ),
        (["gpt-175b", "--nodes", "1"], "does not fit on 1 node of frontier"),
        (["train_175b"], "is a run, not a model\n    fix: frontier-llm plan --run train_175b"),
        (["{file}"], "is a run, not a model\n    fix: frontier-llm plan --run "),
        (["gpt-1t", "--nodes", "64", "--fix", "tensor=1", "--fix", "recompute=full"], "none of the"),
        (["gpt-1t", "--machine", "local"], "the smallest machine with enough memory"),
        ([], "no model is named"),
        (["gpt-22b", "--nodes", "0"], "is not a whole number above 0"),
    ],
)
def test_bad_input_names_the_way_out(
    words: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.yaml").write_text("base: quickstart\ntrain: {steps: 5}\n")
    code, out, err = run(capsys, *(word.format(file=tmp_path / "run.yaml") for word in words))
    assert code == 2
    assert expected in err
    assert "fix:" in err
    assert "Traceback" not in out + err


def test_planning_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from frontier_llm.cli.main import main\n"
        "sys.exit(main(['plan', 'gpt-tiny', '--machine', 'local', '--nodes', '1', 'batch.global_batch=16', "
        "'--explain']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "choice:" in done.stdout


def test_a_checkpoint_is_as_large_as_the_writer_makes_it() -> None:
    model = load_model("llama-tiny")
    # each part is a separate tensor in the file
    parts = 1 + len(ADAMW.states(next(iter(model_parameters(model).values()))))
    assert state_bytes(model, "adamw") == parts * ITEM_BYTES["F32"] * total_parameters(model)


def test_fp16_on_a_device_that_flushes_is_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "run.yaml"
    for dtype, machine, noted in (("fp16", "lumi", True), ("bf16", "lumi", False), ("fp16", "mi300x", False)):
        written.write_text(f"base: train_small\nprecision: {{dtype: {dtype}}}\n")
        assert main(["plan", "--run", str(written), "--machine", machine, "--nodes", "1"]) == 0
        assert ("treat numbers below 6.1e-5 as zero" in capsys.readouterr().err) is noted


def test_nothing_but_validation_loads_the_measurements() -> None:
    """Commands that plan, train or submit a run load neither the measurements of other clusters nor the code that fits
    them.
    """
    commands = ("plan", "train", "submit", "calibrate", "scaling")
    script = f"""
import sys
from frontier_llm.cli import main
{chr(10).join(f"import frontier_llm.cli.{name}" for name in commands)}
assert main.main(["plan", "gpt-22b", "--machine", "frontier", "--nodes", "16", "--json", "--top", "1"]) == 0
import frontier_llm.planner.predict
loaded = sorted(name for name in sys.modules if name.startswith(("benchmarks", "scipy")))
assert not loaded, loaded
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_validation_without_a_checkout_says_where_the_rows_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sites, "root_dir", lambda: tmp_path)  # simulates an installed wheel
    assert main(["plan", "--validate"]) == 2
    said = capsys.readouterr().err
    assert "installed from a wheel" in said and "benchmarks/published" in said
    assert "python -m frontier_llm plan --validate" in said


def test_a_model_that_cannot_be_trained_is_refused_before_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "moe-small", "--nodes", "1", "model.bias=true")
    assert code == 2 and out == "" and "model.bias: is true, but experts have no biases" in err


def test_layouts_whose_real_stages_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """80 layers on 32 virtual stages: the first ranks have 3 + 3 layers. An even split, with 5, would fit."""
    values = ("tensor=2", "pipeline=16", "schedule=v-min", "micro_batch=1", "recompute=none", "zero=1")
    fixed = [word for value in values for word in ("--fix", value)]
    code, _, err = run(capsys, "llama-2-70b", "--nodes", "4", *fixed)
    assert code == 2 and "with these fixed values fits: the smallest needs 64.8 GiB per device, which has 64" in err
