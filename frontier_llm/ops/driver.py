"""Loads code objects (compiled GPU kernels) and launches them, through the GPU driver and csrc/gpu_launcher.cpp.

Launches use torch's current device and stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from frontier_llm.errors import BackendError
from frontier_llm.libraries import DIRECTORY, load_library

LAUNCHER = DIRECTORY / "libgpu_launcher.so"
SLOT_BYTES = 8  # bytes per argument in the buffer of arguments; a shorter argument is at the start of its slot

Argument = Tensor | int | float | None  # argument of a kernel
Grid = tuple[int, int, int]


def block_count(count: int, block: int) -> int:
    """Return the number of blocks that cover `count` elements."""
    return -(-count // block)


class LaunchError(Exception):
    """A code object cannot be loaded or launched. The text is the driver's error message, if there is one."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


@dataclass(frozen=True)
class Code:
    """A code object, and the launch parameters that are equal in all its launches."""

    path: Path
    symbol: str
    arguments: tuple[str, ...]  # names, in the order of the slots
    threads: int  # number of threads of a block
    shared_bytes: int


class Driver(Protocol):
    """Interface for running code objects, on a GPU or on a simulated GPU."""

    def device(self) -> int:
        """Return the index of the device whose memory the kernels read; -1 for the CPU."""

    def load(self, device: int, code: Code, image: bytes) -> int:
        """Load a code object, and return a handle of its kernel. Raises LaunchError.

        `image` is the content of the file. It must stay in memory as long as the handle is used.
        """

    def launch(
        self,
        device: int,
        function: int,
        code: Code,
        grid: Grid,
        slots: bytes,
        arguments: Mapping[str, Argument],
    ) -> None:
        """Launch a loaded kernel. Raises LaunchError.

        `slots` has the arguments in binary form, SLOT_BYTES each. `arguments` has the same arguments by name.
        """


class GpuDriver:
    """The GPU driver: libamdhip64 ("hip") or libcuda ("cuda"), which is opened at run time.

    Raises BackendError if the driver or the launcher is missing.
    """

    def __init__(self, vendor: str) -> None:
        self._library = _open(vendor)

    def device(self) -> int:
        """Return the index of torch's current device."""
        return torch.cuda.current_device()

    def load(self, device: int, code: Code, image: bytes) -> int:
        """Load a code object on a device."""
        function = ctypes.c_void_p()
        if self._library.frontier_gpu_load(
            device,
            image,
            code.symbol.encode(),
            code.shared_bytes,
            ctypes.byref(function),
        ):
            raise LaunchError(_last_error(self._library))
        assert function.value is not None
        return function.value

    def launch(
        self,
        device: int,
        function: int,
        code: Code,
        grid: Grid,
        slots: bytes,
        arguments: Mapping[str, Argument],
    ) -> None:
        """Launch on torch's current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        count = len(slots) // SLOT_BYTES
        if self._library.frontier_gpu_launch(
            device,
            function,
            *grid,
            code.threads,
            code.shared_bytes,
            stream,
            slots,
            count,
        ):
            raise LaunchError(_last_error(self._library))


def architecture_of_device(device: int = 0) -> str:
    """Return the architecture for which this GPU's kernels are built: 'gfx90a', 'sm_90' …

    All minor versions of NVIDIA's sm_8x execute the code of sm_80.
    """
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    if properties.major == 8:
        return f"sm_{properties.major}0"
    return f"sm_{properties.major}{properties.minor}"


def driver_version() -> str:
    """Return the newest CUDA or HIP version that the installed driver supports, such as 'CUDA 12.4'."""
    if torch.version.hip:
        return f"HIP {torch.version.hip}"
    number: int = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return f"CUDA {number // 1000}.{number % 1000 // 10}" if number else "of unknown version"


@cache
def _open(vendor: str) -> ctypes.CDLL:
    """Load the launcher and open the vendor's driver. Raises BackendError if either is missing."""
    launch = [ctypes.c_int, ctypes.c_void_p, *5 * [ctypes.c_uint32], ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    functions: dict[str, tuple[Any, list[Any]]] = {
        "frontier_gpu_error": (ctypes.c_char_p, []),
        "frontier_gpu_launch": (ctypes.c_int, launch),
    }
    library = load_library(LAUNCHER.name, functions)
    if library.frontier_gpu_open(int(vendor == "hip")):
        name = "libamdhip64.so" if vendor == "hip" else "libcuda.so.1"
        fix = f"load the {'ROCm' if vendor == 'hip' else 'CUDA'} module, or add the folder of {name} to LD_LIBRARY_PATH"
        raise BackendError(f"the GPU driver cannot be opened: {_last_error(library)}", fix, "GPU ops")
    return library


def _last_error(library: ctypes.CDLL) -> str:
    """Return the error message of the last launcher call of this thread."""
    return str(library.frontier_gpu_error().decode())
