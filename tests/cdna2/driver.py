"""The simulator in the place of a GPU: loads gfx90a code objects and launches them on tensors in the host's memory."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from elftools.elf.elffile import ELFFile
from torch import Tensor

from frontier_llm.ops.aot import code_object
from frontier_llm.ops.driver import SLOT_BYTES, Argument, Code, Grid
from tests.cdna2.disassembly import Program, disassemble
from tests.cdna2.global_memory import Memory
from tests.cdna2.simulator import Counts, Trace, run
from tests.cdna2.state import Array

# bytes between the addresses under which a kernel knows two tensors: no wrong offset leads from one into another
_FAR = 1 << 40
_PAGE = 4096  # within which an address is what it is on the host, alignment and all


@dataclass(frozen=True)
class Launch:
    """What one launch executed."""

    sha256: str  # of the code object
    symbol: str
    grid: tuple[int, int, int]
    counts: Counts


class SimulatedGpu:
    """A driver for `PrebuiltKernels("gfx90a", driver=...)`. Raises Fault where a kernel does what it must not;
    `launches` is its log.
    """

    def __init__(self) -> None:
        self._functions: list[tuple[str, Program, list[dict[str, Any]]]] = []
        self.launches: list[Launch] = []

    def device(self) -> int:
        """The CPU's."""
        return -1

    def load(self, device: int, code: Code, image: bytes) -> int:
        """Disassemble a code object."""
        self._functions.append(
            (hashlib.sha256(image).hexdigest(), disassemble(image, code.symbol), _metadata_of_arguments(image))
        )
        return len(self._functions) - 1

    def launch(
        self, device: int, function: int, code: Code, grid: Grid, slots: bytes, arguments: Mapping[str, Argument]
    ) -> None:
        """Execute a kernel, now and here."""
        digest, program, declared = self._functions[function]
        tensors = [(name, arguments[name]) for name in code.arguments]
        memory = Memory()
        pointed = [(name, x) for name, x in tensors if isinstance(x, Tensor) and x.data_ptr()]
        words = [
            int.from_bytes(slots[begin : begin + SLOT_BYTES], "little") for begin in range(0, len(slots), SLOT_BYTES)
        ]
        pointers = [
            place for place, word in enumerate(words) if word and declared[place][".value_kind"] == "global_buffer"
        ]
        for number, (place, (name, tensor)) in enumerate(zip(pointers, pointed, strict=True)):
            words[place] = memory.add(name, as_bytes(tensor), (number + 1) * _FAR + words[place] % _PAGE)
        buffer = kernel_arguments(declared, words, code, grid)
        self.launches.append(Launch(digest, program.symbol, grid, self._run(program, code, grid, buffer, memory)))

    def _run(self, program: Program, code: Code, grid: Grid, buffer: bytes, memory: Memory) -> Counts:
        return run(program, grid, code.threads, code.shared_bytes, buffer, memory)


class TracingGpu(SimulatedGpu):
    """Executes the first workgroup of each launch alone: `traces` has what its first wave executed, by symbol, for
    `timing.time_of`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traces: dict[str, tuple[Program, Trace]] = {}

    def _run(self, program: Program, code: Code, grid: Grid, buffer: bytes, memory: Memory) -> Counts:
        trace: Trace = []
        self.traces[program.symbol] = program, trace
        return run(program, grid, code.threads, code.shared_bytes, buffer, memory, trace=trace, workgroups=1)


def as_bytes(tensor: Tensor) -> Array:
    """The memory from a tensor's first to its last element, gaps of a view included, as an array of bytes that
    shares it.
    """
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return torch.as_strided(tensor.detach(), (span,), (1,)).view(torch.uint8).numpy()


def _metadata_of_arguments(image: bytes) -> list[dict[str, Any]]:
    (kernel,) = code_object.amd_metadata(ELFFile(io.BytesIO(image)))["amdhsa.kernels"]
    arguments: list[dict[str, Any]] = kernel[".args"]
    return arguments


def kernel_arguments(declared: Sequence[Mapping[str, Any]], words: Sequence[int], code: Code, grid: Grid) -> bytes:
    """The buffer that HIP makes of a launch's arguments: ours, Triton's two scratch pointers (null), and those that
    it fills by itself.
    """
    hidden = {"hidden_dynamic_lds_size": code.shared_bytes, "hidden_grid_dims": 3}
    for axis, blocks, size in zip("xyz", grid, (code.threads, 1, 1), strict=True):
        hidden |= {f"hidden_block_count_{axis}": blocks, f"hidden_group_size_{axis}": size}
        hidden |= {f"hidden_remainder_{axis}": 0, f"hidden_global_offset_{axis}": 0}
    buffer = bytearray(max(argument[".offset"] + argument[".size"] for argument in declared))
    given = iter([*words, 0, 0])
    for argument in declared:
        kind = argument[".value_kind"]
        begin = argument[".offset"]
        size = argument[".size"]
        value = hidden[kind] if kind.startswith("hidden_") else next(given)
        buffer[begin : begin + size] = value.to_bytes(SLOT_BYTES, "little")[:size]
    return bytes(buffer)
