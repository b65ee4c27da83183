"""`frontier-llm plan` from the outside: reports, files, and what it says to bad input. It must not import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.config.load import load_run
from frontier_llm.topology import make_plan


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_plan_says_what_how_fast_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "gpt-22b", "--nodes", "8", "--global-batch", "512", "--explain", "--allow-cross-node-tp", "--what-if", "micro_batch=1"
    )
    assert code == 0
    for words in ("choice: TP", "runner-up:", "legal layouts", "MFU", "HFU", "node-hours", "checkpoint every", "queue: bin 5", "across nodes: TP16", "what if micro_batch=1", "[measured]", "[published]", "[estimated]", "simulated"):  # fmt: skip
        assert words in out


def test_json_is_complete_and_files_are_usable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emitted, trace, figures = tmp_path / "runs" / "mine.yaml", tmp_path / "trace.json", tmp_path / "figures"
    code, out, err = run(
        capsys, "gpt-22b", "--nodes", "8", "--global-batch", "512", "--json", "--emit", str(emitted), "--chrome-trace", str(trace), "--figures", str(figures)
    )  # fmt: skip
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
    assert "sbatch" in err
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in events} == set(range(best["pipeline"]))
    assert sorted(path.name for path in figures.iterdir()) == ["index.html", "memory.png", "pipeline.png", "scaling.png", "throughput.png"]
    page = (figures / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page.replace("https://", "http://").split("<pre>")[0]


def test_an_emitted_run_keeps_a_changed_sequence_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.yaml"
    code, _, _ = run(capsys, "llama-2-7b", "--nodes", "2", "--global-batch", "64", "--sequence-length", "8192", "--emit", str(path))
    assert code == 0
    assert load_run(str(path)).model.sequence_length == 8192


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gpt-23b", "--nodes", "8"], "did you mean 'gpt-22b'"),
        (["gpt-22b", "--machine", "fronteir"], "did you mean 'frontier'"),
        (["gpt-1t", "--nodes", "2"], "use at least 64 nodes"),
        (["gpt-1t", "--nodes", "383", "--global-batch", "9600"], "or 384 nodes"),
        (["gpt-22b", "--nodes", "8", "--fix", "tensor=7"], "no legal layout"),
        (["gpt-1t", "--nodes", "64", "--fix", "tensor=1", "--fix", "recompute=full"], "none of the"),
        (["gpt-1t", "--machine", "local"], "the smallest that holds it"),
        ([], "no model is named"),
        (["gpt-22b", "--nodes", "0"], "ask for at least one"),
    ],
)
def test_bad_input_names_the_way_out(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert expected in err
    assert "fix:" in err
    assert "Traceback" not in out + err


def test_planning_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from frontier_llm.cli.main import main\n"
        "sys.exit(main(['plan', 'gpt-tiny', '--machine', 'local', '--nodes', '1', '--global-batch', '16', '--explain']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "choice:" in done.stdout
