"""The code objects that tests of the GPU ops look at, and execute."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from frontier_llm.errors import BackendError
from frontier_llm.ops import manifest
from frontier_llm.ops.cdna2 import disassembly
from tests.harness.system import missing


@pytest.fixture(scope="session")
def gfx90a(tmp_path_factory):
    """The shipped folder when it is up to date, else a build into a temporary one (half a minute on one core)."""
    try:
        manifest.read_manifest("gfx90a")
        return manifest.GPU_DIR / "gfx90a"
    except BackendError:
        pytest.importorskip("triton", reason="pip install --no-deps triton")
        folder = tmp_path_factory.mktemp("gpu")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "frontier_llm.ops.triton.build", str(folder), "gfx90a"]
    subprocess.run(command, check=True, env=environment, timeout=280)
    return folder / "gfx90a"


@pytest.fixture(scope="session")
def objects(gfx90a):
    """The same, on a machine that can disassemble them."""
    try:
        disassembly.find_objdump()
    except BackendError as error:
        missing(str(error))
    return gfx90a
