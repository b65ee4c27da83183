"""Instruction sets of this computer's CPU, and a limit on the sets that torch, oneDNN, MKL and the C++ ops use.

The module does not import torch.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from frontier_llm.errors import FrontierError
from frontier_llm.run.rank_env import environ, put

VARIABLE = "FRONTIER_LLM_INSTRUCTION_SET"
CPU_INFO = Path("/proc/cpuinfo")
_X86 = ("x86_64", "AMD64")
_ARM_BF16 = frozenset({"bf16"})


@dataclass(frozen=True, kw_only=True)
class InstructionSet:
    """One CPU instruction set, with its name in each library."""

    name: str  # name in the C++ ops, and value of VARIABLE
    flags: frozenset[str]  # flags in /proc/cpuinfo that the CPU must have
    aten: str  # ATEN_CPU_CAPABILITY
    torch: str  # torch.backends.cpu.get_cpu_capability()
    onednn: str  # ONEDNN_MAX_CPU_ISA
    mkl: str  # MKL_ENABLE_INSTRUCTIONS

    def limits(self) -> dict[str, str]:
        """Return the environment variables that limit the other libraries to this set."""
        return {
            "ATEN_CPU_CAPABILITY": self.aten,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
        }


_AVX2_FLAGS = frozenset({"avx2", "fma"})
_AVX512_FLAGS = _AVX2_FLAGS | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
# In ascending order: a CPU with one set also has all sets that precede it in this list. csrc/cpu/dispatch.cpp has the
# same conditions.
INSTRUCTION_SETS = (
    InstructionSet(name="generic", flags=frozenset(), aten="default", torch="DEFAULT", onednn="SSE41", mkl="SSE4_2"),
    InstructionSet(name="avx2", flags=_AVX2_FLAGS, aten="avx2", torch="AVX2", onednn="AVX2", mkl="AVX2"),
    InstructionSet(
        name="avx512", flags=_AVX512_FLAGS, aten="avx512", torch="AVX512", onednn="AVX512_CORE", mkl="AVX512"
    ),
    InstructionSet(
        name="avx512_bf16",
        flags=_AVX512_FLAGS | {"avx512_bf16"},
        aten="avx512",
        torch="AVX512",
        onednn="AVX512_CORE_BF16",
        mkl="AVX512",
    ),
)


@cache
def cpu_facts(path: Path = CPU_INFO) -> tuple[str, frozenset[str]]:
    """Return the model name and the flags of the first CPU. Flags are empty on a system without /proc/cpuinfo."""
    try:
        first, _, _ = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    except OSError:
        first = ""
    rows = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in rows.items()}
    flags = facts.get("flags") or facts.get("Features") or ""
    return facts.get("model name") or platform.machine(), frozenset(flags.split())


def supported_sets() -> list[InstructionSet]:
    """Return the instruction sets that this CPU has, in ascending order."""
    _, flags = cpu_facts()
    if platform.machine() not in _X86:
        return [INSTRUCTION_SETS[0]]
    return [one for one in INSTRUCTION_SETS if one.flags <= flags]


def chosen_set() -> InstructionSet:
    """Return the instruction set that this process uses: the set in VARIABLE, otherwise the CPU's best set.

    Raises FrontierError if the variable has an unknown value, or if this CPU lacks the set.
    """
    supported = supported_sets()
    wanted = environ(VARIABLE)
    if not wanted:
        return supported[-1]
    names = [one.name for one in INSTRUCTION_SETS]
    if wanted not in names:
        raise FrontierError(f"{wanted!r} is not an instruction set", f"one of {', '.join(names)}", VARIABLE)
    for one in supported:
        if one.name == wanted:
            return one
    model, _ = cpu_facts()
    raise FrontierError(
        f"this CPU ({model}) lacks {wanted}; its best set is {supported[-1].name}",
        f"choose one of {', '.join(one.name for one in supported)}, or unset {VARIABLE}",
        VARIABLE,
    )


def has_bf16_instructions() -> bool:
    """Return True if the instruction set in use multiplies bf16 numbers."""
    if platform.machine() not in _X86:
        _, flags = cpu_facts()
        return flags >= _ARM_BF16
    return "avx512_bf16" in chosen_set().flags


def limit_instruction_set() -> None:
    """Limit torch, oneDNN and MKL to the instruction set in VARIABLE. Does nothing if the variable is not set.

    Processes that this process starts inherit the limit. Call this before torch is imported, because torch reads its
    limit only once. Raises FrontierError if torch is imported with another limit, if one of the libraries' variables
    contradicts VARIABLE, or if this CPU lacks the set.
    """
    if not environ(VARIABLE):
        return
    wanted = chosen_set()
    limits = wanted.limits()
    for name, value in limits.items():
        current = environ(name)
        if current and current.lower() != value.lower():
            raise FrontierError(
                f"{name}={current} contradicts {VARIABLE}={wanted.name}, which sets {name}={value}",
                f"unset {name} or {VARIABLE}",
                VARIABLE,
            )
    unset = [name for name in limits if not environ(name)]
    if unset and "torch" in sys.modules:
        raise FrontierError(
            f"torch is imported already, so {VARIABLE}={wanted.name} comes too late for it",
            f"export {VARIABLE} before the program starts, and import torch after frontier_llm has read it "
            "(frontier_llm.machine.processor.limit_instruction_set)",
            VARIABLE,
        )
    for name in unset:
        put(name, limits[name])


def describe_cpu(torch_capability: str, ops_set: str) -> str:
    """Return one line: the CPU, and the instruction sets of torch, oneDNN and the C++ ops.

    `torch_capability` is torch.backends.cpu.get_cpu_capability(). `ops_set` is the set of the C++ ops, or ''.
    oneDNN uses the CPU's best set up to ONEDNN_MAX_CPU_ISA.
    """
    model, _ = cpu_facts()
    limit = environ("ONEDNN_MAX_CPU_ISA") or environ("DNNL_MAX_CPU_ISA")
    onednn = limit or f"the CPU's best (at least {supported_sets()[-1].onednn})"
    origin = f" (limited by {VARIABLE})" if environ(VARIABLE) else ""
    ours = ops_set or "not built"
    return f"CPU {model}: ops {ours}, torch {torch_capability}, oneDNN {onednn}{origin}"
