"""Loads the library of C++ ops, which setup.py has built ahead of time."""

from __future__ import annotations

import functools

import torch

from frontier_llm.libraries import DIRECTORY, TORCH_OPS, torch_ops_sources
from frontier_llm.machine.processor import VARIABLE, chosen_set, describe_cpu
from frontier_llm.run.rank_env import environ

CPU_LIBRARY = DIRECTORY / TORCH_OPS


@functools.cache
def load_cpu_library() -> str:
    """Register the C++ ops under torch.ops.frontier_llm. Return '', or the reason why they are not available."""
    if not CPU_LIBRARY.exists():
        return f"{CPU_LIBRARY.name} has not been built"
    try:
        torch.ops.load_library(str(CPU_LIBRARY))
    except OSError as error:
        return f"{CPU_LIBRARY.name} does not load into torch {torch.__version__}: {str(error).splitlines()[0]}"
    # Older libraries do not have this attribute. The result is then None.
    built_from = getattr(torch.ops.frontier_llm, "built_from", None)
    sources = torch_ops_sources()
    if sources is not None and (built_from is None or built_from() != sources):
        # Refuse an old library: if the meaning of an argument has changed, the library would compute wrong numbers
        # without an error.
        return f"{CPU_LIBRARY.name} was built from other sources than the present csrc/cpu"
    built_for = torch.ops.frontier_llm.built_for()
    if built_for != torch.__version__:
        # The library could read tensors of another torch version incorrectly.
        return f"{CPU_LIBRARY.name} was built for torch {built_for}, but torch {torch.__version__} is loaded"
    if environ(VARIABLE):  # without the variable the library uses the CPU's best instruction set
        torch.ops.frontier_llm.use_instruction_set(chosen_set().name)
    return ""


def describe_instruction_sets() -> str:
    """Return one line: this CPU, and the instruction sets that torch, oneDNN and the C++ ops use."""
    ops_set = "" if load_cpu_library() else torch.ops.frontier_llm.instruction_set()
    return describe_cpu(torch.backends.cpu.get_cpu_capability(), ops_set)
