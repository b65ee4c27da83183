"""Each program of benchmarks/ executes a short run, to show that it still imports, measures and prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import ROOT
from tests.harness.marks import exhaustive, thorough

FOLDER = ROOT / "benchmarks"
# These modules have no short run: libraries, programs that another program starts, generators with their own check, and
# one program that needs a cluster.
WITHOUT = {
    "harness": "library",
    "comm/simulated_link": "library",
    "convergence/power_law": "library",
    "peers/deepspeed_pipeline_step": "peers/gpt starts it",
    "peers/megatron_core_step": "peers/gpt starts it",
    "planner/measure_layouts": "starts a Slurm cluster and measures for minutes",
    "planner/unchanged_prices": "compares two checkouts",
    "published/best": "test_promise.py compares its file",
    "published/datasets": "library",
    "published/predict": "library",
    "published/rows": "library",
    "published/validate": "library",
}
# CI leaves these out. The programs of peers/ take minutes, because DeepSpeed compiles an op when it starts. The others
# train several runs on several ranks, or plan many layouts.
LONG = (
    "comm/gradient_wire",
    "comm/in_flight",
    "comm/overlap",
    "comm/rendezvous",
    "convergence/experts",
    "convergence/muon",
    "ops/context",
    "peers/gpt",
    "peers/moe",
    "planner/plan",
    "planner/schedule_table",
    "training/engines",
    "training/schedules",
    "training/switch_vendors",
    "training/two_versions",
)
FILES = sorted(
    str(path.relative_to(FOLDER).with_suffix(""))
    for path in FOLDER.rglob("*.py")
    if "tests" not in path.parts and path.name != "__init__.py"
)


def test_each_program_has_a_short_run() -> None:
    assert set(WITHOUT) <= set(FILES)
    without = {name for name in FILES if "parse_arguments(" not in source(name)}
    assert without == set(WITHOUT) - {"harness"}, "give the program a short run (benchmarks.harness.parse_arguments)"


def test_each_program_is_in_the_table_of_the_readme() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    programs = [name for name in FILES if WITHOUT.get(name) not in ("library", "peers/gpt starts it")]
    assert [name for name in programs if f"| `python -m benchmarks.{name.replace('/', '.')}" not in text] == []


def source(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.timeout(1800)  # ends a hang; the longest short run takes 9 minutes on a machine with much other load
@pytest.mark.parametrize(
    "name", [exhaustive(name) if name in LONG else thorough(name) for name in FILES if name not in WITHOUT]
)
def test_a_short_run_ends_well_and_changes_no_file(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name.replace('/', '.')}", "--smoke"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    before = changes()
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.strip()
    assert changes() == before and not list(tmp_path.iterdir())


def changes() -> str:
    """Return the files of the checkout that differ from its commit."""
    listed = subprocess.run(
        ["git", "status", "--porcelain"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return listed.stdout
