"""If a package is missing or a directory is not writable, commands report it in one line with a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.harness.system import full_disk
from tests.unit.experiments.measure.test_report import make_run

BLOCKED = ("torch", "plotly", "tensorboard", "transformers")
# Commands with their arguments. {d} is the directory for outputs, {run} the directory of a run.
COMMANDS = {
    "plan --emit": "plan gpt-tiny --machine local --nodes 1 --emit {d}/x.yaml",
    "plan --figures": "plan gpt-tiny --machine local --nodes 1 --figures {d}/plan.html",
    "plan --chrome-trace": "plan gpt-tiny --machine local --nodes 1 --chrome-trace {d}/trace.json",
    "train": "train bench train.run_dir={d}/new train.steps=2",
    "train on ranks": "train bench train.run_dir={d}/new train.steps=2 parallel.data=2",
    "report": "report {run} --output {d}/report.html",
    "doctor": "doctor --this-node --run-dir {d}",
    "submit": "submit train_22b --site frontier --nodes 16 -A x --dry-run train.run_dir={d}/new",
    "status": "status {run}",
    "scaling": "scaling weak --model gpt-175b --nodes 16,32 --site frontier -A x --simulate --output {d}/series",
    "data tokenizer": "data tokenizer {text} --output {d}/t.model --vocab-size 300",
    "data tokenize": "data tokenize {text} --output {d}/tokens --tokenizer bytes",
    "data check": "data check {d}/tokens",
    "data inspect": "data inspect {d}/tokens",
    "checkpoint list": "checkpoint list {run}",
    "checkpoint import-hf": "checkpoint import-hf {d}",
    "evaluate": "evaluate {run} --data {d}/tokens",
    "generate": "generate {run} --prompt x",
    "ops list": "ops list",
    "ops check": "ops check",
    "bench step": "bench step bench train.run_dir={d}/new",
    "bench comm": "bench comm bench train.run_dir={d}/new parallel.data=2",
    "bench ops": "bench ops --model gpt-tiny",
    "calibrate": "calibrate bench --ranks 1 --emit-machine {d}/machine.yaml",
    "completion": "completion bash",
}
# These commands check their input first or measure for a long time, so they are not run with an unwritable output.
READERS = (
    "calibrate",
    "data tokenizer",
    "evaluate",
    "checkpoint import-hf",
    "data check",
    "data inspect",
    "bench step",
    "bench comm",
)
WRITERS = {name: words for name, words in COMMANDS.items() if "{d}" in words and name not in READERS}
# one process for all commands, because starting Python takes the most time
_EACH = """
import contextlib, io, json, sys
from frontier_llm.cli.main import main
results = {}
for name, words in json.loads(sys.argv[1]).items():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except BaseException as error:
            code = f"Traceback: {type(error).__name__}: {error}"
    results[name] = (code, said.getvalue())
print("RESULTS" + json.dumps(results))
"""


def run_each(
    tmp_path: Path,
    place: Path,
    commands: Mapping[str, str],
    environment: Mapping[str, str],
) -> dict[str, tuple[int, str]]:
    text = tmp_path / "text.txt"
    text.write_text("a few words of text\n" * 200)
    run_dir = make_run(tmp_path / "run")
    words = {name: line.format(d=place, run=run_dir, text=text).split() for name, line in commands.items()}
    program = [sys.executable, "-c", _EACH, json.dumps(words)]
    done = subprocess.run(
        program,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=tmp_path,
        timeout=280,
    )
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done.stderr
    results = json.loads(done.stdout.rpartition("RESULTS")[2])
    assert results.keys() == commands.keys()
    for name, (code, said) in results.items():
        assert code in (0, 1) or (code == 2 and "fix: " in said), (name, code, said)
    return {name: (code, said) for name, (code, said) in results.items()}


def test_a_bare_wheel(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nfor name in {BLOCKED}:\n    sys.modules[name] = None\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    results = run_each(tmp_path, tmp_path, COMMANDS, {"PYTHONPATH": path})
    for name in (
        "train",
        "train on ranks",
        "checkpoint list",
        "evaluate",
        "generate",
        "ops list",
        "bench step",
        "bench comm",
        "calibrate",
    ):
        assert results[name][0] == 2 and "torch is not installed\n    fix: pip install torch" in results[name][1], (
            results[name]
        )
    assert results["plan --figures"][0] == 2 and "pip install plotly" in results["plan --figures"][1]
    assert not list((tmp_path / "new").glob("logs/*")), "no rank was started"
    for name in (
        "plan --emit",
        "plan --chrome-trace",
        "submit",
        "status",
        "data tokenize",
        "data inspect",
        "completion",
        "report",
    ):
        assert results[name][0] == 0, results[name]
    page = (tmp_path / "report.html").read_text()
    assert "no figures: plotly is not installed (pip install plotly)" in results["report"][1]
    assert "No figures: plotly is not installed." in page and "4.100" in page and "<td>reduce_scatter</td>" in page


@pytest.mark.thorough
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """/proc refuses all writes, even from root."""
    results = run_each(tmp_path, Path("/proc/none"), WRITERS, {})
    assert [(name, said) for name, (code, said) in results.items() if code == 2 and "/proc/none" not in said] == []


@pytest.mark.thorough
def test_a_full_disk(tmp_path: Path) -> None:
    """Every command reports an output that it cannot write completely, and leaves no part of it."""
    with full_disk(tmp_path / "full") as full:
        results = run_each(tmp_path, full, WRITERS, {})
        said = {
            name: (code, "No space left on device" in text or "has 0 B" in text, str(full) in text)
            for name, (code, text) in results.items()
        }
        assert said == {
            name: {"doctor": (1, True, True), "submit": (0, False, True)}.get(name, (2, True, True)) for name in WRITERS
        }
        assert [path.name for path in full.rglob("*") if path.is_file()] == ["filler"]
