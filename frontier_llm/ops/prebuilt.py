"""The prebuilt GPU kernels: manifest, digests, and launching through csrc/gpu_launcher.cpp. Neither Triton nor a compiler is needed.

A manifest that is missing, stale or damaged is one BackendError that names the command to run; nothing is compiled instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from frontier_llm.errors import BackendError, Problem
from frontier_llm.ops.kernel_table import ARCHITECTURES
from frontier_llm.ops.native import NATIVE_DIR

MANIFEST_VERSION = 1
GPU_DIR = NATIVE_DIR / "gpu"
LAUNCHER = NATIVE_DIR / "libgpu_launcher.so"
Argument = Tensor | int | float | None

_SLOT = {"i32": "i4x", "i64": "q", "fp32": "f4x"}  # 8 bytes each; pointers are Q
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Kernels(Protocol):
    """Where `ops.gpu` sends its launches: to the GPU, or in tests to Triton's interpreter."""

    def block(self, kernel: str, variant: str, name: str) -> int:
        """A compile-time constant of a variant: what the grid is computed from."""
        ...

    def launch(self, kernel: str, dtype: torch.dtype, variant: str, grid: tuple[int, int, int], *arguments: Argument) -> None:
        """Run a variant over `grid` with the arguments in the order of `kernel_table`."""
        ...


def build_command(architecture: str) -> str:
    """What the user types to build the kernels of an architecture."""
    return f"pip install --no-deps triton && python setup.py build_ops --arch {architecture}"


@cache
def source_digest() -> str:
    """One digest of the kernel sources and their table: a manifest of other sources is stale."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in [*sorted((here / "triton").glob("*.py")), here / "kernel_table.py"]:
        if path.name != "build.py":
            digest.update(path.read_bytes())
    return digest.hexdigest()


def architecture_of_device(device: int = 0) -> str:
    """'gfx90a', 'sm_90' …: the name under which this GPU's kernels are built. Minor versions of NVIDIA's sm_8x run sm_80's code."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}0" if properties.major == 8 else f"sm_{properties.major}{properties.minor}"


def read_manifest(architecture: str, folder: Path | None = None) -> dict[str, Any]:
    """The manifest of an architecture, checked against the sources and every code object's digest.

    Raises BackendError for an architecture without prebuilt ops, a stale manifest, or damaged code objects (all of them named).
    """
    folder = folder or GPU_DIR / architecture
    path = folder / "manifest.json"
    build = build_command(architecture)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise BackendError(f"no GPU ops are built for {architecture} (there are: {known})", "set ops.* to sdpa or reference", "GPU ops")
    if not path.is_file():
        raise BackendError(f"the ops for {architecture} have not been built: no {path.name} in {folder}", build, "GPU ops")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = (manifest["version"], manifest["architecture"], manifest["sources_sha256"])
        codes = [(code["file"], code["sha256"]) for code in manifest["kernels"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackendError(f"unreadable manifest: {type(error).__name__}: {error}", build, str(path)) from error
    if found != (MANIFEST_VERSION, architecture, source_digest()):
        raise BackendError("the code objects were built from other kernel sources than these", build, str(path))
    damaged = [file for file, digest in codes if not _has_digest(folder / file, digest)]
    if damaged:
        raise BackendError(
            [Problem(str(folder / file), "missing, or not the file that was built (sha256 differs)", build) for file in damaged]
        )
    return manifest


def _has_digest(path: Path, digest: str) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == digest
    except OSError:
        return False


@dataclass(frozen=True)
class _Code:
    """A manifest line as the launcher wants it."""

    path: Path
    symbol: bytes
    threads: int
    shared_bytes: int
    layout: struct.Struct
    pointers: tuple[bool, ...]
    constants: dict[str, int]


class PrebuiltKernels:
    """The code objects of one architecture, loaded on first use on each device."""

    def __init__(self, architecture: str, folder: Path | None = None) -> None:
        folder = folder or GPU_DIR / architecture
        manifest = read_manifest(architecture, folder)
        self.architecture, self.tools = architecture, manifest["tools"]
        self._codes = {(c["kernel"], c["dtype"], c["variant"]): _code(folder, c) for c in manifest["kernels"]}
        self._constants = {(kernel, variant): code.constants for (kernel, _, variant), code in self._codes.items()}
        self._functions: dict[tuple[int, str, str, str], int] = {}
        self._library = _open_driver(ARCHITECTURES[architecture][0])

    def block(self, kernel: str, variant: str, name: str) -> int:
        """A compile-time constant of a variant."""
        return self._constants[kernel, variant][name]

    def launch(self, kernel: str, dtype: torch.dtype, variant: str, grid: tuple[int, int, int], *arguments: Argument) -> None:
        """Launch on torch's current device and stream; raises BackendError with the driver's own words."""
        if 0 in grid:
            return
        name = _DTYPE_NAMES[dtype]
        code, device = self._codes[kernel, name, variant], torch.cuda.current_device()
        function = self._functions.get((device, kernel, name, variant))
        if function is None:
            function = self._functions[device, kernel, name, variant] = self._load(device, code)
        values = (_address(a) if pointer else a for a, pointer in zip(arguments, code.pointers, strict=True))
        packed, error = code.layout.pack(*values), ctypes.create_string_buffer(512)
        dims, stream = (ctypes.c_uint32 * 3)(*grid), torch.cuda.current_stream().cuda_stream
        failed = self._library.frontier_gpu_launch(
            device,
            ctypes.c_void_p(function),
            dims,
            code.threads,
            code.shared_bytes,
            ctypes.c_void_p(stream),
            packed,
            len(code.pointers),
            error,
            512,
        )
        if failed:
            raise BackendError(f"{kernel} ({name}, {variant}) on grid {grid}: {error.value.decode()}", where="GPU launch")

    def _load(self, device: int, code: _Code) -> int:
        function, error = ctypes.c_void_p(), ctypes.create_string_buffer(512)
        image = code.path.read_bytes()
        if self._library.frontier_gpu_load(device, image, code.symbol, code.shared_bytes, ctypes.byref(function), error, 512):
            raise BackendError(error.value.decode(), build_command(self.architecture), str(code.path))
        assert function.value is not None
        return function.value


def _address(tensor: Argument) -> int:
    assert tensor is None or isinstance(tensor, Tensor)
    return 0 if tensor is None else tensor.data_ptr()


def _code(folder: Path, line: dict[str, Any]) -> _Code:
    kinds = [kind for _, kind in line["arguments"]]
    layout = struct.Struct("<" + "".join("Q" if kind.startswith("*") else _SLOT[kind] for kind in kinds))
    return _Code(
        path=folder / line["file"],
        symbol=line["symbol"].encode(),
        threads=line["threads"],
        shared_bytes=line["shared_bytes"],
        layout=layout,
        pointers=tuple(kind.startswith("*") for kind in kinds),
        constants=line["constants"],
    )


@cache
def _open_driver(vendor: str) -> ctypes.CDLL:
    """The launcher with the vendor's driver opened; raises BackendError when either is missing."""
    if not LAUNCHER.exists():
        raise BackendError(f"{LAUNCHER.name} has not been built", "scripts/build_native.sh", "GPU ops")
    library, error = ctypes.CDLL(str(LAUNCHER)), ctypes.create_string_buffer(512)
    if library.frontier_gpu_open(int(vendor == "hip"), error, 512):
        name = "libamdhip64.so" if vendor == "hip" else "libcuda.so.1"
        fix = f"load the {'ROCm' if vendor == 'hip' else 'CUDA'} module, or put the folder of {name} into LD_LIBRARY_PATH"
        raise BackendError(f"the GPU driver cannot be opened: {error.value.decode()}", fix, "GPU ops")
    return library
