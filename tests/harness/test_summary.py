"""The end of the tests' output names what was skipped, and which failures were unsteady."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.summary import skip_lines

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os

import pytest


@pytest.mark.skip(reason="no GPU")
def test_skipped() -> None: ...


def test_alone() -> None:
    assert "FRONTIER_LLM_SECOND_LOOK" in os.environ
"""


def test_reasons_are_grouped_by_remedy() -> None:
    reasons = ["no GPU", "apt-get install chromium", "no GPU", "scripts/build_native.sh", "apt-get install chromium"]
    assert skip_lines(reasons) == [
        "skipped: 5 tests, 3 of them because something is not installed",
        "to run these: apt-get install chromium (2); scripts/build_native.sh (1)",
        "other reasons: no GPU (2)",
    ]


@pytest.mark.thorough
def test_a_failure_that_passes_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "conftest.py").write_text("from tests.harness.summary import pytest_terminal_summary\n")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-o", "addopts=", str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    variables.pop("FRONTIER_LLM_SECOND_LOOK", None)
    first = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert first.returncode == 1 and "unsteady" not in first.stdout
    assert "other reasons: no GPU (1)" in first.stdout
    variables["FRONTIER_LLM_SECOND_LOOK"] = "1"
    second = subprocess.run(
        [*command, "--last-failed"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert second.returncode == 0
    assert "unsteady: test_two.py::test_alone failed among other tests and passed alone" in second.stdout
