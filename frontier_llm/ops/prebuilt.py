"""The prebuilt GPU kernels: a launch picks the code object, packs its arguments and hands both to a driver. No Triton, no compiler.

What exists comes from `ops.manifest`; what runs it is `ops.driver`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from frontier_llm.errors import BackendError
from frontier_llm.ops.driver import Driver, GpuDriver, LaunchError
from frontier_llm.ops.kernel_table import ARCHITECTURES
from frontier_llm.ops.manifest import GPU_DIR, build_command, read_manifest

Argument = Tensor | int | float | None

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


@dataclass(frozen=True)
class _Code:
    """One code object as the launcher wants it."""

    path: Path
    symbol: str
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

    def __init__(self, architecture: str, folder: Path | None = None, driver: Driver | None = None) -> None:
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
        self._driver = driver or GpuDriver(ARCHITECTURES[architecture].backend)

    def block(self, kernel: str, variant: str, name: str) -> int:
        """A compile-time constant of a variant."""
        return self._constants[kernel, variant][name]

    def launch(self, kernel: str, dtype: torch.dtype, variant: str, grid: tuple[int, int, int], *arguments: Argument) -> None:
        """Launch on the driver's device; raises BackendError with the driver's own words."""
        if 0 in grid:
            return
        try:
            self._launch(kernel, dtype, variant, grid, arguments)
        except LaunchError as error:
            where = f"GPU launch of {kernel} ({_DTYPE_NAMES.get(dtype, dtype)}, {variant}) on grid {grid}"
            raise BackendError(str(error), error.fix, where) from error

    def _launch(self, kernel: str, dtype: torch.dtype, variant: str, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
        chosen = self._variants.get((kernel, _DTYPE_NAMES.get(dtype, ""), variant))
        if chosen is None:
            raise LaunchError("there is no code object for this", "use bf16 or fp16, or set ops.* to sdpa or reference")
        device = self._driver.device()
        values = [address_or_number(*declared, value, device) for declared, value in zip(chosen.arguments, arguments, strict=True)]
        unaligned = [chosen.arguments[index][0] for index in chosen.by16 if values[index] % 16]
        code = chosen.codes.get(not unaligned)
        if code is None:
            raise LaunchError(f"{', '.join(unaligned)}: not a multiple of 16, which the code object assumes")
        slots = _packed(chosen, values, grid)
        function = self._functions.get((device, code.path))
        if function is None:
            function = self._functions[device, code.path] = self._load(device, code)
        self._driver.launch(device, function, grid, code.threads, code.shared_bytes, slots)

    def _load(self, device: int, code: _Code) -> int:
        image = code.path.read_bytes()
        try:
            function = self._driver.load(device, image, code.symbol, code.shared_bytes)
        except LaunchError as error:
            raise BackendError(str(error), build_command(self.architecture), str(code.path)) from error
        self._images.append(image)
        return function


def _packed(variant: _Variant, values: Sequence[int | float], grid: tuple[int, int, int]) -> bytes:
    """SLOT_BYTES per argument; raises LaunchError for a number or a grid that the kernel cannot have."""
    if any(blocks > most for blocks, most in zip(grid, _MOST_BLOCKS, strict=True)):
        raise LaunchError(f"a grid has at most {_MOST_BLOCKS} blocks", "take a smaller batch.micro_batch")
    try:
        return variant.layout.pack(*values)
    except struct.error as error:
        named = ", ".join(f"{name} {value}" for (name, _), value in zip(variant.arguments, values, strict=True))
        raise LaunchError(f"a number does not fit its type ({error}): {named}", "take a smaller batch.micro_batch") from error


def _variant(arguments: list[tuple[str, str, bool]]) -> _Variant:
    kinds = [kind for _, kind, _ in arguments]
    layout = struct.Struct("<" + "".join("Q" if kind.startswith("*") else _SLOT[kind] for kind in kinds))
    by16 = tuple(index for index, (_, _, assumed) in enumerate(arguments) if assumed)
    return _Variant({}, tuple((name, kind) for name, kind, _ in arguments), by16, layout)


def _code(folder: Path, line: dict[str, Any]) -> _Code:
    return _Code(folder / line["file"], line["symbol"], line["threads"], line["shared_bytes"], line["constants"])
