"""The shared libraries that setup.py builds ahead of time from csrc/: found, loaded and checked; nothing is compiled here."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frontier_llm.errors import BackendError

DIRECTORY = Path(__file__).resolve().parent / "_native"
BUILD_COMMAND = "scripts/build_native.sh (in a checkout), or pip install --no-build-isolation ."


def load_library(name: str, functions: Mapping[str, tuple[Any, Sequence[Any]]], answers: Mapping[str, int] | None = None) -> ctypes.CDLL:
    """A library by its file's name; `functions`: what each returns and takes; `answers`: what functions without arguments must return, its version say.

    Raises BackendError with the build command when it is missing, foreign, or answers otherwise.
    """
    path = DIRECTORY / name
    if not path.exists():
        raise BackendError(f"{name} has not been built", BUILD_COMMAND, str(DIRECTORY))
    try:
        library = ctypes.CDLL(str(path))
        given = {question: getattr(library, question)() for question in answers or {}}
        if given != (answers or {}):
            raise BackendError(f"{name} answers {given}, expected {answers}", f"build it again: {BUILD_COMMAND}", str(DIRECTORY))
        for function, (result, arguments) in functions.items():
            getattr(library, function).restype, getattr(library, function).argtypes = result, arguments
    except (OSError, AttributeError) as error:
        what = f"{name} does not load: {str(error).splitlines()[0]}"
        raise BackendError(what, f"build it on this machine: {BUILD_COMMAND}", str(DIRECTORY)) from error
    return library
