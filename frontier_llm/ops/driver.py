"""The GPU's own driver, through csrc/gpu_launcher.cpp: loads a code object and launches it on torch's current device
and stream.
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
SLOT_BYTES = 8  # of each argument, which stands at its slot's start

Argument = Tensor | int | float | None  # of a kernel
Grid = tuple[int, int, int]


class LaunchError(Exception):
    """A code object cannot be loaded or launched so; the text is the driver's own where the driver refused."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


@dataclass(frozen=True)
class Code:
    """One code object, and what each of its launches is given."""

    path: Path
    symbol: str
    arguments: tuple[str, ...]  # names, in the order of the slots
    threads: int  # of a block
    shared_bytes: int


class Driver(Protocol):
    """What runs code objects: a GPU, or what stands in its place."""

    def device(self) -> int:
        """Index of the device whose memory the kernels read; -1 is the CPU's."""

    def load(self, device: int, code: Code, image: bytes) -> int:
        """A handle of the function in a code object; raises LaunchError. `image`, what the file holds, must outlive
        it.
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
        """Run a loaded function; `slots` are its arguments, SLOT_BYTES each, which `arguments` has by name. Raises
        LaunchError.
        """


class GpuDriver:
    """libamdhip64 ("hip") or libcuda ("cuda"), found at run time; raises BackendError when it or the launcher is
    missing.
    """

    def __init__(self, vendor: str) -> None:
        self._library = _open(vendor)

    def device(self) -> int:
        """Torch's current device."""
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
    """'gfx90a', 'sm_90' …: the name under which this GPU's kernels are built. Minor versions of NVIDIA's sm_8x run
    sm_80's code.
    """
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    if properties.major == 8:
        return f"sm_{properties.major}0"
    return f"sm_{properties.major}{properties.minor}"


@cache
def _open(vendor: str) -> ctypes.CDLL:
    """The launcher with the vendor's driver opened; raises BackendError when either is missing."""
    launch = [ctypes.c_int, ctypes.c_void_p, *5 * [ctypes.c_uint32], ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    functions: dict[str, tuple[Any, list[Any]]] = {
        "frontier_gpu_error": (ctypes.c_char_p, []),
        "frontier_gpu_launch": (ctypes.c_int, launch),
    }
    library = load_library(LAUNCHER.name, functions)
    if library.frontier_gpu_open(int(vendor == "hip")):
        name = "libamdhip64.so" if vendor == "hip" else "libcuda.so.1"
        fix = (
            f"load the {'ROCm' if vendor == 'hip' else 'CUDA'} module, or put the folder of {name} into LD_LIBRARY_PATH"
        )
        raise BackendError(f"the GPU driver cannot be opened: {_last_error(library)}", fix, "GPU ops")
    return library


def _last_error(library: ctypes.CDLL) -> str:
    """What went wrong in this thread's last call."""
    return str(library.frontier_gpu_error().decode())
