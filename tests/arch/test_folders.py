"""Imports that each top-level folder may have, the listed scripts, and the contents of a wheel."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_SCRIPTS = 30
FOLDERS = ("frontier_llm", "scripts", "benchmarks", "tests", "launch")
# Modules of tests/ that contain only helpers. Programs outside tests/ may import these modules, and no others of
# tests/.
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


@pytest.mark.thorough
def test_a_wheel_from_a_source_archive_works_without_the_checkout(tmp_path: Path) -> None:
    """The checkout's compiled libraries are copied into the build, so that nothing is compiled. The sources in the
    archive are compared with git's files.
    """
    build_archive = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    run_in(ROOT, [*build_archive, "sdist", "--dist-dir", str(tmp_path)])
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("frontier_llm-*/")
    assert [path.name for path in source.rglob("*.so")] == []
    for folder in ("csrc", "configs", "slurm", "launch"):
        packed = {str(path.relative_to(source / folder)) for path in (source / folder).rglob("*") if path.is_file()}
        assert packed == set(files_of(folder)), folder

    library = tmp_path / "library"
    native = library / "frontier_llm" / "_native"
    native.mkdir(parents=True)
    for path in (ROOT / "frontier_llm" / "_native").glob("*.so"):
        shutil.copyfile(path, native / path.name)  # newer than the sources, so that setup.py does not compile them
    build_wheel = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(library)]
    run_in(source, [*build_wheel, "bdist_wheel", "--dist-dir", str(tmp_path)])
    (wheel,) = tmp_path.glob("*.whl")

    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    run_in(tmp_path, [sys.executable, "-m", "venv", "--without-pip", str(environment)])
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    run_in(tmp_path, [*pip, str(wheel)])
    (packages,) = environment.glob("lib/python*/site-packages")
    # Add the dependencies of this environment. Python reads no .pth files in a folder that a .pth file adds, so the
    # checkout stays invisible.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    command = str(environment / "bin" / "frontier-llm")
    assert str(environment) in run_in(
        tmp_path, [str(python), "-c", "import frontier_llm; print(frontier_llm.__file__)"]
    )
    assert "TP" in run_in(tmp_path, [command, "plan", "gpt-22b", "--machine", "frontier", "--nodes", "2"])
    assert "C++" in run_in(tmp_path, [command, "ops", "list"])


def run_in(folder: Path, command: list[str]) -> str:
    """Run a command in a folder, without this checkout on Python's path, and return its output."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
