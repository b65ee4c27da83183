"""Imports that each top-level folder may have, the listed scripts, and the contents of a wheel."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_SCRIPTS = 30
FOLDERS = ("frontier_llm", "scripts", "benchmarks", "tests", "launch")
# Helpers without tests of their own. Programs outside tests/ may import these, and nothing else of tests/.
HELPERS = ("tests.harness", "tests.cdna2")
ALLOWED = {
    "frontier_llm": ("frontier_llm",),
    "launch": ("frontier_llm",),
    "scripts": ("frontier_llm", *HELPERS),
    "benchmarks": ("frontier_llm", "benchmarks", *HELPERS),
    "tests": ("frontier_llm", "tests"),
}


def imports_of(source: str) -> Iterator[str]:
    """Yield the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def refused(folder: str, source: str) -> list[str]:
    """Return the imports of this project's folders that a file of `folder` must not have."""
    own = [name for name in imports_of(source) if name.partition(".")[0] in FOLDERS]
    return [name for name in own if not f"{name}.".startswith(tuple(f"{allowed}." for allowed in ALLOWED[folder]))]


def test_folders_import_only_what_they_may() -> None:
    found = {
        str(path.relative_to(ROOT)): wrong
        for folder in ALLOWED
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (wrong := refused(folder, path.read_text(encoding="utf-8")))
    }
    assert found == {}, "move what both need into frontier_llm or tests/harness"


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("tests", "from scripts import prose"),
        ("tests", "import benchmarks.harness"),
        ("scripts", "from tests.parity.cases import Case"),
        ("scripts", "from benchmarks import harness"),
        ("benchmarks", "def late():\n    from tests.unit.ops import stretches"),
        ("frontier_llm", "from tests.harness import pool"),
    ],
)
def test_an_import_that_is_not_allowed_is_found(folder: str, line: str) -> None:
    assert len(refused(folder, line)) == 1
    assert refused("benchmarks", "from benchmarks import harness\nfrom tests.harness.pool import RankPool") == []


def test_only_the_tests_of_scripts_load_scripts() -> None:
    loads = re.compile(r"spec_from_file_location\(.*scripts|sys\.path\.insert\(.*scripts")
    folder = ROOT / "tests" / "unit" / "scripts"
    others = [path for path in (ROOT / "tests").rglob("*.py") if folder not in path.parents and path != Path(__file__)]
    found = [str(path.relative_to(ROOT)) for path in others if loads.search(path.read_text(encoding="utf-8"))]
    assert found == [], "run a script as a process, or move what both need into frontier_llm or tests/harness"


def files_of(folder: str) -> list[str]:
    """Return the paths of a folder's files in git, relative to the folder."""
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path.removeprefix(f"{folder}/") for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def test_each_script_is_in_the_table_of_their_readme() -> None:
    scripts = [name for name in files_of("scripts") if name != "README.md"]
    rows = re.findall(r"^\| `scripts/([\w./]+)` \|", (ROOT / "scripts" / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(rows) == sorted(scripts)
    assert len(scripts) <= MOST_SCRIPTS, "a program that produces a figure belongs to benchmarks/"


def test_a_wheel_contains_the_package_and_its_shared_files_alone(tmp_path: Path) -> None:
    """The same setup.py copies the files that `pip install` copies beside the compiled libraries."""
    python = ["build_py", "--build-lib", str(tmp_path / "packages")]
    shared = ["install_data", "--install-dir", str(tmp_path / "data")]
    for words in (python, shared):
        command = [sys.executable, "setup.py", "--quiet", *words]
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {path.name for path in (tmp_path / "packages").iterdir()} == {"frontier_llm"}
    assert (tmp_path / "packages" / "frontier_llm" / "planner" / "best_published.json").is_file()
    done = subprocess.run(
        [sys.executable, "-m", "frontier_llm", "plan", "--validate"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "packages")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and f"installed from a wheel ({tmp_path}/packages/frontier_llm)" in done.stderr
    (place,) = (tmp_path / "data" / "share").iterdir()
    assert {path.name for path in place.iterdir()} == {"configs", "docs", "launch", "slurm"}
