"""The GPU's own driver, through csrc/gpu_launcher.cpp: loads a code object and launches it on torch's current device and stream."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Protocol

import torch

from frontier_llm.errors import BackendError
from frontier_llm.ops.native import NATIVE_DIR

LAUNCHER = NATIVE_DIR / "libgpu_launcher.so"
SLOT_BYTES = 8  # of each argument, which stands at its slot's start


class LaunchError(Exception):
    """A code object cannot be loaded or launched so; the text is the driver's own where the driver refused."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


class Driver(Protocol):
    """What runs code objects: a GPU, or in its place a simulator."""

    def device(self) -> int:
        """Index of the device whose memory the kernels read; -1 is the CPU's."""
        ...

    def load(self, device: int, image: bytes, symbol: str, shared_bytes: int) -> int:
        """A handle of the function in a code object; raises LaunchError. `image` must outlive it."""
        ...

    def launch(self, device: int, function: int, grid: tuple[int, int, int], threads: int, shared_bytes: int, slots: bytes) -> None:
        """Run a loaded function; `slots` are its arguments, SLOT_BYTES each. Raises LaunchError."""
        ...


class GpuDriver:
    """libamdhip64 ("hip") or libcuda ("cuda"), found at run time; raises BackendError when it or the launcher is missing."""

    def __init__(self, vendor: str) -> None:
        self._library = _open(vendor)

    def device(self) -> int:
        """Torch's current device."""
        return torch.cuda.current_device()

    def load(self, device: int, image: bytes, symbol: str, shared_bytes: int) -> int:
        """Load a code object on a device."""
        function, error = ctypes.c_void_p(), ctypes.create_string_buffer(512)
        if self._library.frontier_gpu_load(device, image, symbol.encode(), shared_bytes, ctypes.byref(function), error, 512):
            raise LaunchError(error.value.decode())
        assert function.value is not None
        return function.value

    def launch(self, device: int, function: int, grid: tuple[int, int, int], threads: int, shared_bytes: int, slots: bytes) -> None:
        """Launch on torch's current stream."""
        error, dims = ctypes.create_string_buffer(512), (ctypes.c_uint32 * 3)(*grid)
        stream, count = torch.cuda.current_stream().cuda_stream, len(slots) // SLOT_BYTES
        if self._library.frontier_gpu_launch(
            device, ctypes.c_void_p(function), dims, threads, shared_bytes, ctypes.c_void_p(stream), slots, count, error, 512
        ):
            raise LaunchError(error.value.decode())


def architecture_of_device(device: int = 0) -> str:
    """'gfx90a', 'sm_90' …: the name under which this GPU's kernels are built. Minor versions of NVIDIA's sm_8x run sm_80's code."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}0" if properties.major == 8 else f"sm_{properties.major}{properties.minor}"


@cache
def _open(vendor: str) -> ctypes.CDLL:
    """The launcher with the vendor's driver opened; raises BackendError when either is missing."""
    if not LAUNCHER.exists():
        raise BackendError(f"{LAUNCHER.name} has not been built", "scripts/build_native.sh", "GPU ops")
    library, error = ctypes.CDLL(str(LAUNCHER)), ctypes.create_string_buffer(512)
    if library.frontier_gpu_open(int(vendor == "hip"), error, 512):
        name = "libamdhip64.so" if vendor == "hip" else "libcuda.so.1"
        fix = f"load the {'ROCm' if vendor == 'hip' else 'CUDA'} module, or put the folder of {name} into LD_LIBRARY_PATH"
        raise BackendError(f"the GPU driver cannot be opened: {error.value.decode()}", fix, "GPU ops")
    return library
