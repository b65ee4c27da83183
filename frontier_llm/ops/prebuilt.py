"""The prebuilt GPU kernels: manifest, digests, and launching through csrc/gpu_launcher.cpp. Neither Triton nor a compiler is needed.

A manifest that is missing, stale or damaged is one BackendError that names the command to run; nothing is compiled instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from frontier_llm.errors import BackendError, Problem
from frontier_llm.ops.kernel_table import ARCHITECTURES
from frontier_llm.ops.native import NATIVE_DIR

MANIFEST_VERSION = 2
GPU_DIR = NATIVE_DIR / "gpu"
LAUNCHER = NATIVE_DIR / "libgpu_launcher.so"
Argument = Tensor | int | float | None

# Which Tritons' code objects take two scratch pointers after their own arguments, which is what the launcher passes (3.4 has one).
TRITON_FROM, TRITON_BEFORE = (3, 5), (4, 0)

_SLOT = {"i32": "i4x", "i64": "q", "fp32": "f4x"}  # 8 bytes each; pointers are Q
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_POINTED = {f"*{name}": dtype for dtype, name in _DTYPE_NAMES.items()}
_POINTED |= {"*fp64": torch.float64, "*i64": torch.int64, "*i32": torch.int32}
_MOST_BLOCKS = (2**31 - 1, 65535, 65535)  # of a grid, on either vendor


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


def check_triton(version: str, architecture: str, where: str) -> None:
    """Raises BackendError for a Triton whose code objects the launcher cannot start."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not TRITON_FROM <= numbers < TRITON_BEFORE:
        wanted = f">={'.'.join(map(str, TRITON_FROM))},<{TRITON_BEFORE[0]}"
        fix = build_command(architecture).replace("--no-deps triton", f"--no-deps 'triton{wanted}'")
        raise BackendError(f"compiled by Triton {version}; the launcher is for code objects of Triton {wanted}", fix, where)


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
        triton = str(manifest["tools"]["triton"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackendError(f"unreadable manifest: {type(error).__name__}: {error}", build, str(path)) from error
    if found != (MANIFEST_VERSION, architecture, source_digest()):
        raise BackendError("the code objects were built from other kernel sources than these", build, str(path))
    check_triton(triton, architecture, str(path))
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
    """One code object as the launcher wants it."""

    path: Path
    symbol: bytes
    threads: int
    shared_bytes: int
    constants: dict[str, int]


@dataclass(frozen=True)
class _Variant:
    """A variant's code objects (by whether they assume alignment) and what they take."""

    codes: dict[bool, _Code]
    arguments: tuple[tuple[str, str], ...]  # (name, type)
    by16: tuple[int, ...]  # which of them the aligned code assumes to be multiples of 16
    layout: struct.Struct


def address_or_number(name: str, kind: str, value: Argument, device: int) -> int | float:
    """What a kernel gets for an argument: a tensor's address (0 for None) or the number itself.

    Raises BackendError for a tensor of another type or on another device (index, -1 is the CPU): the kernel would read garbage.
    """
    if not kind.startswith("*"):
        assert not isinstance(value, Tensor) and value is not None, name
        return value
    if value is None:
        return 0
    assert isinstance(value, Tensor), name
    if value.dtype is not _POINTED[kind] or value.get_device() != device:
        what = f"{name} is {value.dtype} on {value.device}, the kernel reads {_POINTED[kind]} on the current device ({device})"
        raise BackendError(what, "give the op tensors of one type, on the device that torch.cuda.set_device chose", "GPU launch")
    return value.data_ptr()


class PrebuiltKernels:
    """The code objects of one architecture, loaded on first use on each device."""

    def __init__(self, architecture: str, folder: Path | None = None) -> None:
        folder = folder or GPU_DIR / architecture
        manifest = read_manifest(architecture, folder)
        self.architecture, self.tools = architecture, manifest["tools"]
        self._variants: dict[tuple[str, str, str], _Variant] = {}
        for line in manifest["kernels"]:
            key = line["kernel"], line["dtype"], line["variant"]
            variant = self._variants.setdefault(key, _variant(line["arguments"]))
            variant.codes[line["aligned"]] = _code(folder, line)
        self._constants = {(k, v): next(iter(variant.codes.values())).constants for (k, _, v), variant in self._variants.items()}
        self._functions: dict[tuple[int, Path], int] = {}
        self._images: list[bytes] = []  # no driver promises to have copied a code object that it has loaded
        self._library = _open_driver(ARCHITECTURES[architecture].backend)

    def block(self, kernel: str, variant: str, name: str) -> int:
        """A compile-time constant of a variant."""
        return self._constants[kernel, variant][name]

    def launch(self, kernel: str, dtype: torch.dtype, variant: str, grid: tuple[int, int, int], *arguments: Argument) -> None:
        """Launch on torch's current device and stream; raises BackendError with the driver's own words."""
        if 0 in grid:
            return
        where = f"GPU launch of {kernel} ({_DTYPE_NAMES.get(dtype, dtype)}, {variant}) on grid {grid}"
        chosen = self._variants.get((kernel, _DTYPE_NAMES.get(dtype, ""), variant))
        if chosen is None:
            raise BackendError("there is no code object for this", "use bf16 or fp16, or set ops.* to sdpa or reference", where)
        device = torch.cuda.current_device()
        values = [address_or_number(*declared, value, device) for declared, value in zip(chosen.arguments, arguments, strict=True)]
        unaligned = [chosen.arguments[index][0] for index in chosen.by16 if values[index] % 16]
        code = chosen.codes.get(not unaligned)
        if code is None:
            raise BackendError(f"{', '.join(unaligned)}: not a multiple of 16, which the code object assumes", where=where)
        packed = _packed(chosen, values, grid, where)
        function = self._functions.get((device, code.path))
        if function is None:
            function = self._functions[device, code.path] = self._load(device, code)
        error, dims = ctypes.create_string_buffer(512), (ctypes.c_uint32 * 3)(*grid)
        stream, count = torch.cuda.current_stream().cuda_stream, len(values)
        if self._library.frontier_gpu_launch(
            device, ctypes.c_void_p(function), dims, code.threads, code.shared_bytes, ctypes.c_void_p(stream), packed, count, error, 512
        ):
            raise BackendError(error.value.decode(), where=where)

    def _load(self, device: int, code: _Code) -> int:
        function, error = ctypes.c_void_p(), ctypes.create_string_buffer(512)
        image = code.path.read_bytes()
        if self._library.frontier_gpu_load(device, image, code.symbol, code.shared_bytes, ctypes.byref(function), error, 512):
            raise BackendError(error.value.decode(), build_command(self.architecture), str(code.path))
        self._images.append(image)
        assert function.value is not None
        return function.value


def _packed(variant: _Variant, values: Sequence[int | float], grid: tuple[int, int, int], where: str) -> bytes:
    """8 bytes per argument; raises BackendError for a number or a grid that the kernel cannot have."""
    if any(blocks > most for blocks, most in zip(grid, _MOST_BLOCKS, strict=True)):
        raise BackendError(f"a grid has at most {_MOST_BLOCKS} blocks", "take a smaller batch.micro_batch", where)
    try:
        return variant.layout.pack(*values)
    except struct.error as error:
        named = ", ".join(f"{name} {value}" for (name, _), value in zip(variant.arguments, values, strict=True))
        raise BackendError(f"a number does not fit its type ({error}): {named}", "take a smaller batch.micro_batch", where) from error


def _variant(arguments: list[tuple[str, str, bool]]) -> _Variant:
    kinds = [kind for _, kind, _ in arguments]
    layout = struct.Struct("<" + "".join("Q" if kind.startswith("*") else _SLOT[kind] for kind in kinds))
    by16 = tuple(index for index, (_, _, assumed) in enumerate(arguments) if assumed)
    return _Variant({}, tuple((name, kind) for name, kind, _ in arguments), by16, layout)


def _code(folder: Path, line: dict[str, Any]) -> _Code:
    return _Code(folder / line["file"], line["symbol"].encode(), line["threads"], line["shared_bytes"], line["constants"])


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
