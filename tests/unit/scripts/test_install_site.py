"""scripts/install_site.sh: the commands and their order, for a site with and without a container.

pip and the builds are only recorded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Runs -c with the real interpreter, and records all other calls.
RECORDER = """#!/bin/bash
if [[ "$1" == -c ]]; then exec {python} "$@"; fi
echo "{name} $*" >>{log}
if [[ "$*" == *{failing}* ]]; then exit 1; fi
"""


def install(tmp_path: Path, site: str, failing: str = "nothing") -> tuple[int, list[str]]:
    log = tmp_path / "log"
    log.unlink(missing_ok=True)
    for name in ("host", "apptainer"):
        program = tmp_path / name
        program.write_text(RECORDER.format(python=sys.executable, name=name, log=log, failing=failing))
        program.chmod(0o755)
    (tmp_path / "image.sif").touch()
    environment = {**os.environ, "PYTHON": str(tmp_path / "host"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if site == "lumi":
        environment["FRONTIER_LLM_CONTAINER"] = str(tmp_path / "image.sif")
    done = subprocess.run(
        [ROOT / "scripts" / "install_site.sh", site], env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, log.read_text().splitlines() if log.exists() else [done.stderr]


@pytest.mark.parametrize("site, runner", [("frontier", "host"), ("lumi", "apptainer")])
def test_one_command_builds_libraries_and_kernels_and_checks_them(tmp_path: Path, site: str, runner: str) -> None:
    code, words = install(tmp_path, site)
    assert code == 0, words
    (kernels,) = [line for line in words if "build_ops" in line]
    assert kernels.startswith(runner) and kernels.endswith("setup.py build_ops --arch gfx90a")
    libraries = "build_ext --inplace" if site == "lumi" else "pip install --no-build-isolation --editable ."
    assert next(line for line in words if libraries in line).startswith(runner)
    assert words[-1] == f"host -m frontier_llm.cli.main doctor --installation --site {site}"
    # neither torch nor triton is replaced
    assert not [line for line in words if "torch" in line.split() or "triton" in line.split()]


@pytest.mark.thorough
def test_a_failed_build_or_check_fails_the_command(tmp_path: Path) -> None:
    assert install(tmp_path, "frontier", failing="build_ops")[0] == 1
    assert install(tmp_path, "frontier", failing="doctor")[0] == 1
    code, words = install(tmp_path, "local")
    assert code == 0 and not [line for line in words if "build_ops" in line]
