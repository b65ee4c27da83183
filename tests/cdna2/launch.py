"""Load one code object and launch it on numpy arrays."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import numpy as np
from elftools.elf.elffile import ELFFile

from .disassembly import Program, disassemble
from .global_memory import Memory
from .simulator import Counts, Trace, run
from .state import Array

Grid = tuple[int, int, int]

# bytes between the addresses of two arrays: so large that a wrong offset cannot reach another array
_DISTANCE_BYTES: Final = 1 << 40
# an array keeps its offset within a page, and therefore its alignment
_PAGE_BYTES: Final = 4096
_SLOT_BYTES: Final = 8


@dataclass(frozen=True)
class Slot:
    """One argument in a launch's argument buffer (kernarg). `kind` is `.value_kind` of the code object's metadata."""

    kind: str
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel that `launch` can execute. `threads` is the number of threads in a workgroup."""

    program: Program
    threads: int
    slots: tuple[Slot, ...]


def load(image: bytes) -> Kernel:
    """Read a gfx90a code object that has exactly one kernel. Raises SimulatorError as `disassemble` does."""
    elf: Any = ELFFile(io.BytesIO(image))
    note = next(elf.get_section_by_name(".note").iter_notes())
    (metadata,) = msgpack.unpackb(note["n_descdata"])["amdhsa.kernels"]
    slots = tuple(Slot(slot[".value_kind"], slot[".offset"], slot[".size"]) for slot in metadata[".args"])
    program = disassemble(image, metadata[".symbol"].removesuffix(".kd"))
    return Kernel(program, metadata[".max_flat_workgroup_size"], slots)


def launch(
    kernel: Kernel,
    grid: Grid,
    arguments: Mapping[str, Array | int],
    *,
    shared_bytes: int = 0,
    trace: Trace | None = None,
    workgroups: int | None = None,
) -> Counts:
    """Execute a kernel, which changes the arrays in place. Raises Fault if the kernel breaks a rule of the machine.

    `arguments` are in the kernel's order; their names appear in faults. An array is passed by its address, a number by
    its bits. Arguments beyond them (Triton's scratch pointers) are null. `shared_bytes` is the dynamic LDS of a
    workgroup. See `run` for `trace` and `workgroups`.
    """
    memory = Memory()
    words: list[int] = []
    for name, value in arguments.items():
        if isinstance(value, int):
            words.append(value)
            continue
        if not value.flags.c_contiguous:
            raise ValueError(f"array {name} is not contiguous: pass the bytes that it lies in")
        address = (len(words) + 1) * _DISTANCE_BYTES + value.ctypes.data % _PAGE_BYTES
        words.append(memory.add(name, value.reshape(-1).view(np.uint8), address))
    return run(
        program=kernel.program,
        grid=grid,
        threads=kernel.threads,
        shared_bytes=shared_bytes,
        kernarg=_kernel_arguments(kernel, grid, words, shared_bytes),
        memory=memory,
        trace=trace,
        workgroups=workgroups,
    )


def _kernel_arguments(kernel: Kernel, grid: Grid, words: list[int], shared_bytes: int) -> bytes:
    """Return the argument buffer that HIP would build: the given arguments, and the hidden ones that HIP adds."""
    hidden = {"hidden_dynamic_lds_size": shared_bytes, "hidden_grid_dims": 3}
    for axis, blocks, size in zip("xyz", grid, (kernel.threads, 1, 1), strict=True):
        hidden[f"hidden_block_count_{axis}"] = blocks
        hidden[f"hidden_group_size_{axis}"] = size
        hidden[f"hidden_remainder_{axis}"] = 0
        hidden[f"hidden_global_offset_{axis}"] = 0
    own_slots = [slot for slot in kernel.slots if slot.kind not in hidden]
    if len(words) > len(own_slots):
        raise ValueError(f"{len(words)} arguments for {kernel.program.symbol}, which has {len(own_slots)}")
    values = dict(zip(own_slots, words, strict=False))
    buffer = bytearray(max(slot.offset + slot.size_bytes for slot in kernel.slots))
    for slot in kernel.slots:
        value = hidden[slot.kind] if slot.kind in hidden else values.get(slot, 0)
        buffer[slot.offset : slot.offset + slot.size_bytes] = value.to_bytes(_SLOT_BYTES, "little")[: slot.size_bytes]
    return bytes(buffer)
