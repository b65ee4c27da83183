"""Finds or builds the code objects (compiled GPU kernels) of gfx90a that tests inspect and execute."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

from frontier_llm.errors import BackendError
from frontier_llm.ops import manifest

KEPT = Path(__file__).resolve().parents[2] / "build"  # also used by setup.py, and ignored by git


@cache
def folder() -> Path:
    """Return the shipped folder of code objects if it is up to date, else one that is built for the tests.

    The build takes half a minute on one core.
    """
    built = KEPT / f"triton-{version('triton')}" / "gfx90a"
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / "lock").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several test workers builds
        for objects in (manifest.GPU_DIR / "gfx90a", built):
            try:
                manifest.read_manifest("gfx90a", objects)
                return objects
            except BackendError:
                continue
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "frontier_llm.ops.aot.build", str(built.parent), "gfx90a"]
        subprocess.run(command, check=True, env=environment, timeout=280)
    return built
