"""The simulator in the place of a GPU: loads gfx90a code objects and launches them on tensors in the host's memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.ops import code_object
from frontier_llm.ops.cdna2.disassembly import Program, disassemble
from frontier_llm.ops.cdna2.global_memory import Memory
from frontier_llm.ops.cdna2.simulator import Counts, run
from frontier_llm.ops.cdna2.state import Array
from frontier_llm.ops.driver import SLOT_BYTES

_FAR = 1 << 40  # bytes between the addresses under which a kernel knows two tensors: no wrong offset leads from one into another
_PAGE = 4096  # within which an address is what it is on the host, alignment and all


@dataclass(frozen=True)
class Launch:
    """What one launch executed."""

    sha256: str  # of the code object
    symbol: str
    grid: tuple[int, int, int]
    counts: Counts


class SimulatedGpu:
    """A driver for `PrebuiltKernels("gfx90a", driver=...)`. Raises Fault where a kernel does what it must not; `launches` is its log."""

    def __init__(self) -> None:
        self._functions: list[tuple[str, Program, code_object.Declared]] = []
        self.launches: list[Launch] = []

    def device(self) -> int:
        """The CPU's."""
        return -1

    def load(self, device: int, image: bytes, symbol: str, shared_bytes: int) -> int:
        """Disassemble a code object."""
        self._functions.append((hashlib.sha256(image).hexdigest(), disassemble(image, symbol), code_object.read(image)))
        return len(self._functions) - 1

    def launch(
        self, device: int, function: int, grid: tuple[int, int, int], threads: int, shared_bytes: int, slots: bytes,
        tensors: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """Execute a kernel, now and here."""
        digest, program, declared = self._functions[function]
        memory, pointed = Memory(), [(name, tensor) for name, tensor in tensors.items() if tensor.data_ptr()]
        words = [int.from_bytes(slots[begin : begin + SLOT_BYTES], "little") for begin in range(0, len(slots), SLOT_BYTES)]
        pointers = [place for place, parameter in enumerate(declared.parameters[: len(words)]) if parameter.pointer and words[place]]
        for number, (place, (name, tensor)) in enumerate(zip(pointers, pointed, strict=True)):
            words[place] = memory.add(name, as_bytes(tensor), (number + 1) * _FAR + words[place] % _PAGE)
        arguments = kernel_arguments(declared, words, grid, threads, shared_bytes)
        self.launches.append(Launch(digest, program.symbol, grid, self._run(program, grid, threads, shared_bytes, arguments, memory)))

    def _run(
        self, program: Program, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: bytes, memory: Memory
    ) -> Counts:
        return run(program, grid, threads, shared_bytes, arguments, memory)


class TracingGpu(SimulatedGpu):
    """Executes the first workgroup of each launch alone: `traces` has what its first wave executed, by symbol, for `timing.time_of`."""

    def __init__(self) -> None:
        super().__init__()
        self.traces: dict[str, tuple[Program, list[int]]] = {}

    def _run(
        self, program: Program, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: bytes, memory: Memory
    ) -> Counts:
        trace: list[int] = []
        self.traces[program.symbol] = program, trace
        return run(program, grid, threads, shared_bytes, arguments, memory, trace=trace, workgroups=1)


def as_bytes(tensor: Tensor) -> Array:
    """The memory from a tensor's first to its last element, gaps of a view included, as an array of bytes that shares it."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return torch.as_strided(tensor.detach(), (span,), (1,)).view(torch.uint8).numpy()


def kernel_arguments(
    declared: code_object.Declared, words: Sequence[int], grid: tuple[int, int, int], threads: int, shared_bytes: int
) -> bytes:
    """The buffer that HIP makes of a launch's arguments: ours, Triton's two scratch pointers (null), and the hidden ones."""
    buffer = bytearray(max([declared.parameters_bytes, *(hidden.offset + hidden.size_bytes for hidden in declared.hidden)]))
    for parameter, word in zip(declared.parameters, [*words, 0, 0], strict=True):
        given = word.to_bytes(SLOT_BYTES, "little")[: parameter.size_bytes]
        buffer[parameter.offset : parameter.offset + parameter.size_bytes] = given
    known = {"dynamic_lds_size": shared_bytes, "grid_dims": 3}
    for axis, blocks, size in zip("xyz", grid, (threads, 1, 1), strict=True):
        known |= {f"block_count_{axis}": blocks, f"group_size_{axis}": size, f"remainder_{axis}": 0, f"global_offset_{axis}": 0}
    for hidden in declared.hidden:
        value = known[hidden.kind.removeprefix("hidden_")]
        buffer[hidden.offset : hidden.offset + hidden.size_bytes] = value.to_bytes(hidden.size_bytes, "little")
    return bytes(buffer)
