"""Finds, loads and checks the shared libraries that setup.py builds from csrc/. This module compiles nothing."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frontier_llm.errors import BackendError

DIRECTORY = Path(__file__).resolve().parent / "_native"
TORCH_OPS = "libfrontier_ops.so"  # loaded by torch, and built for one torch version (ops/native.py).
# Libraries that are loaded with ctypes. Each lists its functions without arguments and the value that this version of
# the package expects.
LIBRARIES: dict[str, dict[str, int]] = {
    "libgpu_launcher.so": {},
    "libheartbeat.so": {"fl_heartbeat_abi": 1},
    "libsample_index.so": {"fl_abi": 2},
    "libshm_collectives.so": {"fl_shm_abi": 2},
    "libstore_server.so": {"fl_store_abi": 1},
}
BUILD_COMMAND = "scripts/build_native.sh (in a checkout), or pip install --no-build-isolation ."


def torch_ops_sources() -> str | None:
    """sha256 of the sources of TORCH_OPS, which the library records when it is built. None if there is no checkout."""
    folder = Path(__file__).resolve().parents[1] / "csrc" / "cpu"
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def libraries_digest() -> str:
    """sha256 of all libraries that have been built."""
    digest = hashlib.sha256()
    for path in sorted(DIRECTORY / name for name in (*LIBRARIES, TORCH_OPS)):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def load_library(name: str, functions: Mapping[str, tuple[Any, Sequence[Any]]]) -> ctypes.CDLL:
    """Load a library by its file name. `functions` maps a name to its result type and argument types.

    The values of LIBRARIES are compared with what the library's functions return.
    Raises BackendError with the build command if the library is missing, does not load, or returns another value.
    """
    path = DIRECTORY / name
    expected = LIBRARIES.get(name, {})
    if not path.exists():
        raise BackendError(f"{name} has not been built", BUILD_COMMAND, str(DIRECTORY))
    try:
        library = ctypes.CDLL(str(path))
        given = {question: getattr(library, question)() for question in expected}
        if given != expected:
            raise BackendError(
                f"{name} returns {given}, expected {expected}",
                f"build it again: {BUILD_COMMAND}",
                str(DIRECTORY),
            )
        for function, (result, arguments) in functions.items():
            getattr(library, function).restype, getattr(library, function).argtypes = result, arguments
    except (OSError, AttributeError) as error:
        what = f"{name} does not load: {str(error).splitlines()[0]}"
        raise BackendError(what, f"build it on this machine: {BUILD_COMMAND}", str(DIRECTORY)) from error
    return library
