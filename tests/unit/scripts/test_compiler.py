"""setup.py refuses another C++ compiler than GCC 12 before it compiles anything, and names the module to load. It
builds a library again if anything that the library is built from has changed.
"""

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
        ("19 4", "is clang 19"),
        ("__clang_major__ __GNUC__", "is neither GCC nor clang"),
    ],
)
def test_an_old_compiler_is_refused_with_the_module_to_load(tmp_path: Path, answer: str, named: str) -> None:
    compiler = fake(tmp_path / "bin", "old", answer)
    done, compiled = build(tmp_path, CXX=str(compiler))
    assert done.returncode != 0 and not compiled
    assert f"the C++ parts need GCC 12 or newer: {compiler} {named}" in done.stderr
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
    assert "the C++ parts need" not in done.stderr


RECORDING_COMPILER = """#!/bin/bash
if [[ "$1" == -E ]]; then echo "__clang_major__ 14"; exit; fi
while [[ $# -gt 1 ]]; do if [[ "$1" == -o ]]; then echo built >"$2"; basename "$2" >>"$RECORD"; fi; shift; done
"""
STUB_TORCH = {
    "__init__.py": "compiled_with_cxx11_abi = lambda: True",
    "utils/__init__.py": "",
    "utils/cpp_extension.py": "include_paths = library_paths = lambda: []",
}


def test_a_new_torch_version_builds_only_the_ops_again(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(RECORDING_COMPILER)
    compiler.chmod(0o755)
    package = tmp_path / "stubs" / "torch"
    for name, text in STUB_TORCH.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)

    def written(torch_version: str) -> set[str]:
        record = tmp_path / "record"
        record.write_text("")
        (package / "__init__.py").write_text(f"{STUB_TORCH['__init__.py']}\n__version__ = '{torch_version}'\n")
        variables = {"CXX": str(compiler), "RECORD": str(record), "PYTHONPATH": str(tmp_path / "stubs")}
        done, _ = build(tmp_path, PYTHONDONTWRITEBYTECODE="1", **variables)
        assert done.returncode == 0, done.stderr
        return set(record.read_text().split())

    assert {"libfrontier_ops.so", "libheartbeat.so"} < written("2.13.0")
    assert written("2.13.0") == set()
    again = written("2.14.0")
    assert {"libfrontier_ops.so", "ops.o"} < again and "libheartbeat.so" not in again


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
