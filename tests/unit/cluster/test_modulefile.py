"""slurm/modulefiles/frontier_llm.lua under Lmod: the commands of the checkout run, and unloading restores the shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.system import missing

ROOT = Path(__file__).resolve().parents[3]
LMOD = Path(os.environ.get("LMOD_PKG", "/usr/share/lmod/lmod"), "init/bash")
ENVIRONMENT = Path(sys.prefix)  # the environment of the tests
LOAD = f"source {LMOD}; module use {ROOT}/slurm/modulefiles; module load frontier_llm"


def shell(script: str, environment: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a shell that finds no Python environment by itself."""
    if not LMOD.is_file():
        missing("needs Lmod: apt-get install lmod")
    variables = {"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"], "FRONTIER_LLM_ENV": str(environment)}
    return subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_module_runs_the_commands_of_the_checkout_and_can_be_unloaded() -> None:
    script = f"""{LOAD}
        command -v frontier-llm; echo "$FRONTIER_LLM_PYTHON"; frontier-llm list runs | head -1
        module unload frontier_llm; echo "$PATH"; echo "python=$FRONTIER_LLM_PYTHON"; command -v frontier-llm"""
    lines = shell(script, ENVIRONMENT).stdout.splitlines()
    assert lines[:2] == [f"{ENVIRONMENT}/bin/frontier-llm", f"{ENVIRONMENT}/bin/python"]
    assert lines[2] and lines[3:] == ["/usr/bin:/bin", "python="]


def test_an_environment_without_the_package_is_refused(tmp_path: Path) -> None:
    done = shell(f"{LOAD} || exit 3", tmp_path)
    assert done.returncode == 3
    assert f"{tmp_path} has no frontier-llm: run scripts/install_site.sh" in " ".join(done.stderr.split())


@pytest.mark.thorough
def test_the_quickstarts_run_trains_under_the_module(tmp_path: Path) -> None:
    words = [
        "data.train=synthetic",
        "data.validation=null",
        "data.tokenizer=bytes",
        "parallel.tensor=1",
        "parallel.pipeline=1",
        "train.steps=2",
        f"train.run_dir={tmp_path}/run",
    ]
    done = shell(f"{LOAD}; OMP_NUM_THREADS=1 frontier-llm train quickstart {' '.join(words)}", ENVIRONMENT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "run/checkpoints").is_dir()
