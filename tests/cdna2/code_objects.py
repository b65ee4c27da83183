"""The code objects of gfx90a that tests look at, and execute."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from frontier_llm.errors import BackendError
from frontier_llm.ops import manifest


@cache
def folder() -> Path:
    """The shipped folder when it is up to date, else a build into a temporary one (half a minute on one core)."""
    try:
        manifest.read_manifest("gfx90a")
        return manifest.GPU_DIR / "gfx90a"
    except BackendError:
        destination = tempfile.mkdtemp(prefix="gfx90a-")
        atexit.register(shutil.rmtree, destination, ignore_errors=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "frontier_llm.ops.aot.build", destination, "gfx90a"]
    subprocess.run(command, check=True, env=environment, timeout=280)
    return Path(destination) / "gfx90a"
