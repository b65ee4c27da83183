"""Finds and loads what setup.py built ahead of time; says why it is not there when it is not."""

from __future__ import annotations

import functools

import torch

from frontier_llm.libraries import DIRECTORY, TORCH_OPS

CPU_LIBRARY = DIRECTORY / TORCH_OPS


@functools.cache
def load_cpu_library() -> str:
    """Register the C++ ops under torch.ops.frontier_llm; returns '' or the reason why they are not available."""
    if not CPU_LIBRARY.exists():
        return f"{CPU_LIBRARY.name} has not been built"
    try:
        torch.ops.load_library(str(CPU_LIBRARY))
    except OSError as error:
        return f"{CPU_LIBRARY.name} does not load into torch {torch.__version__}: {str(error).splitlines()[0]}"
    return ""
