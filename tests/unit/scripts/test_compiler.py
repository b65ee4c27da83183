"""setup.py refuses a C++ compiler without C++20 before it compiles anything, and names the module to load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]


def fake(folder: Path, name: str, answer: str) -> Path:
    """Write a compiler whose preprocessor prints `answer`. If it is called to compile, it leaves a mark and fails."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(
        f'#!/bin/bash\nif [[ "$1" == -E ]]; then echo "{answer}"; else touch {folder}/compiled; exit 1; fi\n'
    )
    path.chmod(0o755)
    return path


def build(tmp_path: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], bool]:
    """Run the build. Return its result, and whether a file was compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | variables
    words = ["build_ext", f"--build-lib={tmp_path}/lib", f"--build-temp={tmp_path}/temp"]
    done = subprocess.run(
        [sys.executable, "setup.py", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return done, (tmp_path / "bin" / "compiled").exists()


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("__clang_major__ 7", "is GCC 7"),
        ("14 4", "is clang 14"),
        ("__clang_major__ __GNUC__", "is neither GCC nor clang"),
    ],
)
def test_an_old_compiler_is_refused_with_the_module_to_load(tmp_path: Path, answer: str, named: str) -> None:
    compiler = fake(tmp_path / "bin", "old", answer)
    done, compiled = build(tmp_path, CXX=str(compiler))
    assert done.returncode != 0 and not compiled
    assert f"C++20 needs GCC 12 or clang 16: {compiler} {named}" in done.stderr
    modules = yaml.safe_load((ROOT / "slurm" / "sites" / "frontier.yaml").read_text())["modules"]
    (module,) = [name for name in modules if name.startswith("PrgEnv")]
    assert f"module load {module};" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    done, _ = build(tmp_path, CXX=f"{tmp_path}/none -m64")
    assert done.returncode != 0 and f"no C++ compiler: '{tmp_path}/none' is not on PATH" in done.stderr


@pytest.mark.thorough
def test_a_newer_gxx_is_taken_if_cxx_is_old(tmp_path: Path) -> None:
    """As on SLES 15: a module adds g++, and c++ remains GCC 7."""
    fake(tmp_path / "bin", "c++", "__clang_major__ 7")
    fake(tmp_path / "bin", "g++", "__clang_major__ 14")
    done, compiled = build(tmp_path, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert done.returncode != 0 and compiled  # the fake g++ was called to compile
    assert "C++20 needs" not in done.stderr


def test_the_compiler_here_is_recognised() -> None:
    code = (
        "import sys; sys.argv = ['setup.py', '--version']; import runpy; space = runpy.run_path('setup.py'); "
        "print(space['compiler_version'](['g++']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    version = subprocess.run(
        [str(shutil.which("g++")), "-dumpversion"], capture_output=True, text=True, check=True
    ).stdout
    assert done.stdout.splitlines()[-1] == f"('GCC', {version.split('.')[0].strip()})"
