"""Makes the simulator a GPU driver of `frontier_llm.ops`. Only this file of the folder imports `frontier_llm`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.errors import BackendError
from frontier_llm.ops.driver import SLOT_BYTES, Argument, Code, LaunchError

from .disassembly import Program
from .fault import Fault, SimulatorError
from .launch import Grid, Kernel, launch, load
from .simulator import Counts, Trace
from .state import Array


@dataclass(frozen=True)
class Launch:
    """The record of one launch: the instructions that were executed. `sha256` is the digest of the code object."""

    sha256: str
    symbol: str
    grid: Grid
    counts: Counts


class SimulatedGpu:
    """A driver for `PrebuiltKernels("gfx90a", driver=...)`. `launches` is the log of launches."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._kernels: list[Kernel] = []
        self.launches: list[Launch] = []

    def device(self) -> int:
        """Return the index of the CPU, whose memory the simulator uses."""
        return -1

    def load(self, device: int, code: Code, image: bytes) -> int:
        """Disassemble a code object. Raises BackendError if llvm-objdump is missing or cannot read it."""
        try:
            kernel = load(image)
        except SimulatorError as error:
            raise BackendError(error.what, error.fix, error.where) from error
        self._digests.append(hashlib.sha256(image).hexdigest())
        self._kernels.append(kernel)
        return len(self._kernels) - 1

    def launch(
        self, device: int, function: int, code: Code, grid: Grid, slots: bytes, arguments: Mapping[str, Argument]
    ) -> None:
        """Execute a kernel now. Raises LaunchError with the text of a fault."""
        kernel = self._kernels[function]
        given: dict[str, Array | int] = {}
        for index, name in enumerate(code.arguments):
            word = int.from_bytes(slots[index * SLOT_BYTES : (index + 1) * SLOT_BYTES], "little")
            value = arguments[name]
            given[name] = as_bytes(value) if isinstance(value, Tensor) and word else word
        try:
            counts = self._execute(kernel, grid, given, code.shared_bytes)
        except Fault as fault:
            raise LaunchError(str(fault)) from fault
        self.launches.append(Launch(self._digests[function], kernel.program.symbol, grid, counts))

    def _execute(self, kernel: Kernel, grid: Grid, arguments: Mapping[str, Array | int], shared_bytes: int) -> Counts:
        return launch(kernel, grid, arguments, shared_bytes=shared_bytes)


class TracingGpu(SimulatedGpu):
    """Executes only the first workgroup of each launch.

    `traces` has for each kernel symbol the instructions of its first wave, the input of `timing.time_of`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traces: dict[str, tuple[Program, Trace]] = {}

    def _execute(self, kernel: Kernel, grid: Grid, arguments: Mapping[str, Array | int], shared_bytes: int) -> Counts:
        trace: Trace = []
        self.traces[kernel.program.symbol] = kernel.program, trace
        return launch(kernel, grid, arguments, shared_bytes=shared_bytes, trace=trace, workgroups=1)


def as_bytes(tensor: Tensor) -> Array:
    """Return a byte array that shares the memory from a tensor's first to its last element, with the gaps of a view."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return torch.as_strided(tensor.detach(), (span,), (1,)).view(torch.uint8).numpy()
