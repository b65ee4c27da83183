"""Error messages use the user's words: the name of a flag, not the configuration key behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_llm.cli.arguments import as_typed
from frontier_llm.cli.main import main
from frontier_llm.errors import LayoutError, Problem


def test_each_name_is_replaced_in_every_part_of_every_problem() -> None:
    problems = [
        Problem("parallel.tensor", "parallel.tensor is 3", "lower parallel.tensor"),
        Problem("model.heads", "4", ""),
    ]
    with pytest.raises(LayoutError) as caught, as_typed({"parallel.tensor": "--tensor"}):
        raise LayoutError(problems)
    assert str(caught.value) == "  --tensor: --tensor is 3\n    fix: lower --tensor\n  model.heads: 4"
    assert caught.value.problems[0] == Problem("--tensor", "--tensor is 3", "lower --tensor")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["ops", "kernels", "gfx90"],
            "ARCHITECTURE: there are no GPU ops for 'gfx90'\n    fix: did you mean 'gfx90a'?",
        ),
        (
            ["calibrate", "quickstart", "--emit-machine", "mine.txt"],
            "argument --emit-machine: 'mine.txt' does not end in .yaml: write mine.yaml\n",
        ),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_written_gives_a_code_and_no_traceback() -> None:
    command = [sys.executable, "-m", "frontier_llm", "--version"]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=buffered)
    os.close(writer)
    assert (closed.returncode, closed.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=buffered)
    assert done.returncode == 2
    assert done.stderr.startswith("frontier-llm: error\nstandard output: No space left on device\n    fix: free space")
