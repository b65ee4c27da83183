"""NVIDIA's assembler `ptxas`: which `ptxas` Triton calls, and the notes that it prints for each kernel."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

from frontier_llm.errors import BackendError
from frontier_llm.ops.kernel_table import ARCHITECTURES
from frontier_llm.ops.manifest import PTXAS_VARIABLES
from frontier_llm.run.rank_env import adopt

# Numbered notes about lost speed, such as C7515: wgmma instructions run one after another.
_WARNING = re.compile(r"\((C75\d\d)\)")
_FRAME = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)


@dataclass(frozen=True)
class Assembled:
    """Notes of ptxas about one kernel."""

    warnings: tuple[str, ...]  # codes of ptxas's notes about lost speed, each listed once, in order
    stack_bytes: int  # stack frame of a thread
    spill_store_bytes: int  # bytes of registers that are spilled, per thread
    spill_load_bytes: int

    @property
    def is_clean(self) -> bool:
        """True if ptxas reports no lost speed, no stack frame and no spilled register."""
        return not (self.warnings or self.stack_bytes or self.spill_store_bytes or self.spill_load_bytes)


def use_own_assembler() -> None:
    """Make Triton assemble all NVIDIA code with TRITON_PTXAS_PATH if it is set, otherwise with its wheel's `ptxas`.

    Triton 3.9 would assemble sm_90 with the wheel's `ptxas-blackwell` of CUDA 13, whose code objects (ABI 8) need a
    driver of CUDA 13. TRITON_PTXAS_BLACKWELL_PATH overrides this choice.
    """
    from triton import knobs

    adopt({PTXAS_VARIABLES[1]: knobs.nvidia.ptxas.path})


def assembler_version(architecture: str) -> str:
    """Return the version of the ptxas that assembles an NVIDIA architecture's code, such as '12.9'."""
    from triton.backends.nvidia.compiler import get_ptxas

    use_own_assembler()
    return str(get_ptxas(int(ARCHITECTURES[architecture].target)).version)


@contextlib.contextmanager
def recorded_log() -> Iterator[io.StringIO]:
    """Yield the text that receives ptxas' notes. Triton prints them to stdout, and only if it compiles the kernel."""
    from triton import knobs

    text = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(text):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        yield text


def read_log(text: str) -> Assembled:
    """Return the notes of ptxas in its output for one kernel. Raises BackendError if the output does not report the
    size of the stack.
    """
    frames = [match.groupdict() for match in _FRAME.finditer(text)]
    if not frames:
        raise BackendError(
            f"ptxas printed no stack frame for the kernel: {text.strip()[-200:] or 'no output'}",
            "install the version of Triton that docs/ops.md names",
            "build_ops",
        )
    return Assembled(
        warnings=tuple(dict.fromkeys(_WARNING.findall(text))),
        stack_bytes=max(int(frame["stack"]) for frame in frames),
        spill_store_bytes=sum(int(frame["stores"]) for frame in frames),
        spill_load_bytes=sum(int(frame["loads"]) for frame in frames),
    )
