"""scripts/build_deepspeed_ops.sh with DeepSpeed's own sources and its CPU ops.

If one op fails, the others are still built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from frontier_llm.cluster.sites import root_dir

VERSION = "0.19.8"
INSTALL = f"pip install --no-build-isolation deepspeed=={VERSION}"
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason=INSTALL)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source package of DeepSpeed."""
    folder = tmp_path_factory.mktemp("archive")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        "deepspeed",
    ]
    done = subprocess.run([*command, "--dest", str(folder), f"deepspeed=={VERSION}"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no source package of DeepSpeed: {done.stderr.strip().splitlines()[-1]}")
    return next(folder.glob("deepspeed-*.tar.gz"))


def build(tmp_path: Path, archive: Path, refuse: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the ops pin_memory and cpu_adam. A compiler that reads the name `refuse` fails.

    The interpreter reports that its torch is for ROCm. Nothing else is simulated. Packages go to tmp_path/installed.
    """
    executable(
        tmp_path / "python", f'if [[ "${{2:-}}" == *torch.version.hip* ]]; then exit 0; fi\nexec {sys.executable} "$@"'
    )
    compiler = (
        f'if [[ "$*" == *"{refuse}"* ]]; then echo "planted fault" >&2; exit 1; fi\nexec {shutil.which("g++")} "$@"'
    )
    environment = {
        **os.environ,
        "PYTHON": str(tmp_path / "python"),
        "CC": str(executable(tmp_path / "cc", compiler)),
        "CXX": str(executable(tmp_path / "cxx", compiler)),
        "FRONTIER_LLM_MODULES": "",
        "FRONTIER_LLM_SOURCES": str(tmp_path / "sources"),
        "DS_ACCELERATOR": "cpu",
        "DEEPSPEED_OPS": "cpu_adam pin_memory",
        "DEEPSPEED_SOURCE": str(archive),
        "PIP_TARGET": str(tmp_path / "installed"),
        "PIP_NO_DEPS": "1",
        "PIP_UPGRADE": "1",
    }
    script = root_dir() / "scripts" / "build_deepspeed_ops.sh"
    return subprocess.run([script], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=1700)


def states(tmp_path: Path) -> str:
    """Return the states that `frontier-llm ops list` prints, and the path of the pin_memory library.

    DeepSpeed must load that library without a compiler.
    """
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from frontier_llm.ops.deepspeed_ops import op_states\n"
        "print(op_states())\n"
        "from frontier_llm.ops.no_jit import forbid_jit; forbid_jit()\n"
        "from deepspeed.ops.op_builder import PinMemoryBuilder\n"
        "print(PinMemoryBuilder().load().__file__)\n"
    )
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(root_dir())}
    command = [sys.executable, "-c", code, str(tmp_path / "installed")]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path).stdout


@pytest.mark.exhaustive
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_an_op_that_does_not_build_is_named_and_the_others_stay(tmp_path: Path, archive: Path) -> None:
    done = build(tmp_path, archive, refuse="cpu_adam")
    assert done.returncode == 1, done.stderr
    assert (
        f"error: DeepSpeed's cpu_adam does not build here: see {tmp_path}/sources/deepspeed-logs/cpu_adam.log"
        in done.stderr
    )
    assert "DeepSpeed is installed with these ops prebuilt: pin_memory" in done.stderr
    assert "planted fault" in (tmp_path / "sources/deepspeed-logs/cpu_adam.log").read_text()
    said = states(tmp_path)
    assert "'pin_memory': 'prebuilt for cpu'" in said and "'cpu_adam': 'not prebuilt'" in said
    assert f"{tmp_path}/installed/deepspeed/ops/pin_memory/pin_memory_op" in said
