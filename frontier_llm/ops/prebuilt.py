"""Launches prebuilt GPU kernels: selects the code object, packs the arguments, and passes both to the driver.

`ops.manifest` lists the code objects, and `ops.driver` runs them. Neither Triton nor a compiler is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from frontier_llm.errors import BackendError
from frontier_llm.ops.driver import (
    Argument,
    Code,
    Driver,
    GpuDriver,
    Grid,
    LaunchError,
    architecture_of_device,
    driver_version,
)
from frontier_llm.ops.kernel_table import ARCHITECTURES
from frontier_llm.ops.manifest import GPU_DIR, PTXAS_VARIABLES, read_manifest

_ABI_BYTE = 8  # index of the byte with the ABI version in an ELF file
_SLOT = {"i32": "i4x", "i64": "q", "fp32": "f4x"}  # type → format for `struct`, 8 bytes each; pointers have "Q"
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
POINTED = {f"*{name}": dtype for dtype, name in _DTYPE_NAMES.items()}
POINTED |= {"*fp64": torch.float64, "*i64": torch.int64, "*i32": torch.int32}
_MOST_BLOCKS = (2**31 - 1, 65535, 65535)  # largest grid in x, y and z that both vendors support


class Kernels(Protocol):
    """Interface through which `ops.gpu` launches kernels, on the GPU or (in tests) in Triton's interpreter."""

    def block(self, kernel: str, variant: str, name: str) -> int:
        """Return a compile-time constant of a variant, such as a block size. The caller computes the grid from it."""

    def launch(self, kernel: str, dtype: torch.dtype, variant: str, grid: Grid, /, **arguments: Argument) -> None:
        """Launch a variant with the launch grid `grid`. Arguments have the names in the kernel's source."""


@dataclass(frozen=True)
class _Variant:
    """The aligned and the unaligned code object of a variant, and their common constants and arguments."""

    codes: dict[bool, Code]
    constants: dict[str, int]
    arguments: tuple[tuple[str, torch.dtype | None], ...]  # name, and element type of a pointer; None: a number
    by16: tuple[int, ...]  # indices of the arguments that the aligned code assumes to be multiples of 16
    layout: struct.Struct


def address_or_number(name: str, pointed: torch.dtype | None, value: Argument, device: int) -> int | float:
    """Return the value that is passed to a kernel for an argument: a tensor's address (0 for None), or the number.

    `pointed` is the element type of a pointer, None for a number. `device` is the device's index, -1 for the CPU.
    Raises BackendError for a tensor of another type or on another device, because the kernel would read wrong data.
    """
    if pointed is None:
        assert not isinstance(value, Tensor) and value is not None, name
        return value
    if value is None:
        return 0
    assert isinstance(value, Tensor), name
    if value.dtype is not pointed or value.get_device() != device:
        what = (
            f"{name} is {value.dtype} on {value.device}, but the kernel reads {pointed} on the current device {device}"
        )
        raise BackendError(
            what,
            "give the op tensors of one type, on the device that torch.cuda.set_device has set",
            "GPU launch",
        )
    return value.data_ptr()


class PrebuiltKernels:
    """Implements `Kernels` with the code objects of one architecture. A code object is loaded at its first use on a
    device.
    """

    def __init__(self, architecture: str, folder: Path | None = None, driver: Driver | None = None) -> None:
        folder = folder or GPU_DIR / architecture
        manifest = read_manifest(architecture, folder)
        self.architecture = architecture
        self.tools = manifest["tools"]
        self._variants: dict[tuple[str, str, str], _Variant] = {}
        for line in manifest["kernels"]:
            variant = self._variants.setdefault((line["kernel"], line["dtype"], line["variant"]), _variant(line))
            names = tuple(name for name, _ in variant.arguments)
            code = Code(folder / line["file"], line["symbol"], names, line["threads"], line["shared_bytes"])
            variant.codes[line["aligned"]] = code
        self._constants = {(kernel, name): variant.constants for (kernel, _, name), variant in self._variants.items()}
        self._functions: dict[tuple[int, Path], int] = {}
        self._images: list[bytes] = []  # keeps code objects in memory, because drivers may not copy them
        self._driver = driver or GpuDriver(ARCHITECTURES[architecture].backend)

    def block(self, kernel: str, variant: str, name: str) -> int:
        """Return a compile-time constant of a variant."""
        return self._constants[kernel, variant][name]

    def launch(self, kernel: str, dtype: torch.dtype, variant: str, grid: Grid, /, **arguments: Argument) -> None:
        """Launch on the driver's device. Raises BackendError with the driver's message."""
        if 0 in grid:
            return
        try:
            chosen = self._variants.get((kernel, _DTYPE_NAMES.get(dtype, ""), variant))
            if chosen is None:
                raise LaunchError(
                    "there is no code object for this type and variant",
                    "use bf16 or fp16, or set ops.* to sdpa or reference",
                )
            self._launch(chosen, grid, arguments)
        except LaunchError as error:
            where = f"GPU launch of {kernel} ({_DTYPE_NAMES.get(dtype, dtype)}, {variant}) on grid {grid}"
            raise BackendError(str(error), error.fix, where) from error

    def _launch(self, chosen: _Variant, grid: Grid, arguments: Mapping[str, Argument]) -> None:
        device = self._driver.device()
        assert len(arguments) == len(chosen.arguments), (arguments.keys(), chosen.arguments)
        values = [address_or_number(name, pointed, arguments[name], device) for name, pointed in chosen.arguments]
        unaligned = [chosen.arguments[index][0] for index in chosen.by16 if values[index] % 16]
        code = chosen.codes.get(not unaligned)
        if code is None:
            raise LaunchError(f"{', '.join(unaligned)} must be a multiple of 16 for this code object")
        slots = _packed(chosen, values, grid)
        function = self._functions.get((device, code.path))
        if function is None:
            function = self._functions[device, code.path] = self._load(device, code)
        self._driver.launch(device, function, code, grid, slots, arguments)

    def load_any(self) -> None:
        """Load one code object on the current device, as a test for all of them.

        Raises BackendError if the driver rejects it.
        """
        device = self._driver.device()
        codes = next(iter(self._variants.values())).codes
        code = next(iter(codes.values()))
        self._functions[device, code.path] = self._load(device, code)

    def _load(self, device: int, code: Code) -> int:
        image = code.path.read_bytes()
        try:
            function = self._driver.load(device, code, image)
        except LaunchError as error:
            what = f"{error}: {self._built_with(image)}, which may be newer than this driver ({driver_version()})"
            fix = (
                f"build them again on this machine, with the Triton of this torch: python setup.py build_ops --arch "
                f"{self.architecture}"
            )
            if ARCHITECTURES[self.architecture].backend == "cuda":
                variables = " ".join(f'{name}="$(which ptxas)"' for name in PTXAS_VARIABLES)
                fix += f", or with the assembler of this CUDA: {variables} before that command"
            raise BackendError(what, fix, str(code.path)) from error
        self._images.append(image)
        return function

    def _built_with(self, image: bytes) -> str:
        """Return 'built by Triton 3.9.0, ptxas 12.9, ABI 7'."""
        tools = [f"Triton {self.tools['triton']}"]
        if "ptxas" in self.tools:
            tools.append(f"ptxas {self.tools['ptxas']}")
        if len(image) > _ABI_BYTE:
            tools.append(f"ABI {image[_ABI_BYTE]}")
        return f"built by {', '.join(tools)}"


@cache
def kernels_of_this_gpu() -> PrebuiltKernels:
    """Return the kernels for torch's first GPU.

    Raises BackendError without a GPU, if no kernels were built for it, or if the driver rejects them.
    """
    if not torch.cuda.is_available():
        raise BackendError("torch sees no GPU")
    kernels = PrebuiltKernels(architecture_of_device())
    kernels.load_any()  # report unusable kernels when back-ends are chosen, not at the first launch
    return kernels


def _packed(variant: _Variant, values: Sequence[int | float], grid: Grid) -> bytes:
    """Return the packed arguments, SLOT_BYTES each. Raises LaunchError for a number or a grid that is too large."""
    if grid[0] > _MOST_BLOCKS[0] or grid[1] > _MOST_BLOCKS[1] or grid[2] > _MOST_BLOCKS[2]:
        raise LaunchError(f"a grid has at most {_MOST_BLOCKS} blocks", "reduce batch.micro_batch")
    try:
        return variant.layout.pack(*values)
    except struct.error as error:
        named = ", ".join(f"{name} {value}" for (name, _), value in zip(variant.arguments, values, strict=True))
        raise LaunchError(
            f"a number does not fit its type ({error}): {named}",
            "reduce batch.micro_batch",
        ) from error


def _variant(line: Mapping[str, Any]) -> _Variant:
    """Return the `_Variant` of a manifest entry, still without code objects."""
    arguments: list[tuple[str, str, bool]] = line["arguments"]
    layout = struct.Struct("<" + "".join("Q" if kind.startswith("*") else _SLOT[kind] for _, kind, _ in arguments))
    by16 = tuple(index for index, (_, _, assumed) in enumerate(arguments) if assumed)
    return _Variant(
        {},
        line["constants"],
        tuple((name, POINTED.get(kind)) for name, kind, _ in arguments),
        by16,
        layout,
    )
