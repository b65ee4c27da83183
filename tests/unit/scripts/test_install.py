"""scripts/install.sh: the torch that it uses, and the message before a large download.

A stand-in for pip records its arguments, so nothing is downloaded or built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Installing pip takes most of the time of creating an environment. The stand-in replaces pip.
PYTHON = """#!/usr/bin/env bash
python="$(dirname "$0")/active/bin/python"
if [[ "$1 $2" == "-m venv" ]]; then exec "$python" -m venv --without-pip "${@:3}"; fi
exec "$python" "$@"
"""
PIP = """
import os, sys
with open(os.environ["RECORD"], "a") as file:
    print(*sys.argv[1:], file=file)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, the files that it reads, a stand-in for pip, and an environment without torch."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "install.sh", folder / "scripts")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (tmp_path / "stand_in" / "pip").mkdir(parents=True)
    (tmp_path / "stand_in" / "pip" / "__init__.py").touch()
    (tmp_path / "stand_in" / "pip" / "__main__.py").write_text(PIP, encoding="utf-8")
    (tmp_path / "python").write_text(PYTHON, encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "active")], check=True)
    return folder


FIND_TORCH = 'import importlib.util as u; spec = u.find_spec("torch"); print(spec.origin if spec else "no torch")'


def install(checkout: Path, **variables: str) -> tuple[str, str]:
    """Return the messages of the script and the arguments of pip."""
    place = checkout.parent
    record = place / "pip.txt"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FRONTIER_LLM_")}
    environment |= {
        "PYTHON": str(place / "python"),
        "PYTHONPATH": str(place / "stand_in"),
        "RECORD": str(record),
        **variables,
    }
    done = subprocess.run(
        ["bash", "-ec", f"source scripts/install.sh; python -c '{FIND_TORCH}'"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout, record.read_text(encoding="utf-8")


def test_the_torch_of_an_active_environment_is_used_and_not_replaced(checkout: Path) -> None:
    (packages,) = (checkout.parent / "active" / "lib").glob("python*/site-packages")
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text("__version__ = '2.13.0+cpu'", encoding="utf-8")
    messages, pip = install(checkout)
    assert f"using the torch in {packages}" in messages
    assert messages.splitlines()[-1] == str(packages / "torch" / "__init__.py")
    assert "torch" not in pip and pip.count("--editable") == 1
    _, pip = install(checkout)
    assert pip.count("--editable") == 1
    # Another length, because Python keeps bytecode of a source of equal length and time (in seconds).
    (packages / "torch" / "__init__.py").write_text("__version__ = '2.14.10+cpu'", encoding="utf-8")
    _, pip = install(checkout)
    assert pip.count("--editable") == 2  # the C++ parts are built for one torch version


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="only the index for x86 has the build for CUDA by default")
def test_a_large_download_is_announced_with_its_size_and_the_build_for_cpus(checkout: Path) -> None:
    messages, pip = install(checkout)
    assert "3 to 5 GB of libraries" in messages and "FRONTIER_LLM_TORCH_CPU=1" in messages
    assert "torch==2.13.0" in pip and "--index-url" not in pip
    messages, pip = install(checkout, FRONTIER_LLM_TORCH_CPU="1", FRONTIER_LLM_TORCH="torch==2.14.0")
    assert "GB" not in messages
    assert "--index-url https://download.pytorch.org/whl/cpu torch==2.14.0" in pip
