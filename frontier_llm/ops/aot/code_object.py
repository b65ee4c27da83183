"""Reads the launch requirements of a code object, and compares them with the launch by csrc/gpu_launcher.cpp.

The requirements are read from the ELF file: AMD's metadata note (msgpack) or NVIDIA's .nv.info sections. This needs
neither Triton nor a vendor's tool. Only the build and the tests use this module. A launch uses the manifest.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from frontier_llm.errors import BackendError
from frontier_llm.ops.kernel_table import ARCHITECTURES

_NT_AMDGPU_METADATA = 32
# NVIDIA's attributes: first attributes of a kernel, then attributes of the file, which begin with the symbol's index.
_PARAMETER = 0x17
_THREADS = 0x10
_PARAMETER_BANK = 0x0A
_REGISTERS = 0x2F
_STACK = 0x12
_WITH_PAYLOAD = 4
_GLOBAL_SPACE = 4
_BYTES = {"i32": 4, "fp32": 4, "i64": 8}  # size of an argument by its type; other types are pointers of 8 bytes


# Exceptions that the parsers can raise if an offset or a length in the file is damaged.
_DAMAGED = (
    ELFError,
    ConstructError,
    msgpack.UnpackException,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Slot:
    """Position of an argument in the buffer of kernel arguments."""

    offset: int
    size_bytes: int
    pointer: bool


@dataclass(frozen=True)
class Declared:
    """Launch requirements and resources of a kernel, as its code object declares them."""

    architecture: str
    symbol: str
    parameters: tuple[Slot, ...]
    # bytes of arguments that the driver copies; on AMD without the hidden arguments (hidden_block_count_x …), which the
    # driver fills itself
    parameters_bytes: int
    threads: int  # number of threads of a block
    wave: int  # number of threads of a wave or warp
    registers: int  # registers per thread; on AMD vector registers including the accumulation registers
    spills: int  # AMD: number of spilled registers; NVIDIA: words on a thread's stack
    abi: int  # version of the ELF ABI: a driver refuses versions that it does not know


def read(image: bytes) -> Declared:
    """Return the requirements of a code object's only kernel. Raises BackendError for a file that cannot be read."""
    try:
        elf = ELFFile(io.BytesIO(image))
        machine = elf["e_machine"]
        if machine == "EM_AMDGPU":
            return _read_amd(elf)
        if machine == "EM_CUDA":
            return _read_nvidia(elf)
    except _DAMAGED as error:
        raise BackendError(f"the code object cannot be read: {type(error).__name__}: {error}") from error
    raise BackendError("the file is not a code object for an AMD or NVIDIA GPU")


def check_launch(
    declared: Declared, architecture: str, symbol: str, kinds: Sequence[str], threads: int, shared_bytes: int
) -> None:
    """Compare a kernel's requirements with the launch of csrc/gpu_launcher.cpp.

    The launcher passes the arguments and two scratch pointers. `kinds` are the arguments' types in launch order. Raises
    BackendError with every difference, and if a block needs more shared memory than the architecture has.
    """
    machine = ARCHITECTURES[architecture]
    pointers = [kind.startswith("*") for kind in kinds] + [True, True]
    given = []
    end = 0
    for pointer, size in zip(pointers, [*(_BYTES.get(kind, 8) for kind in kinds), 8, 8], strict=True):
        offset = -(-end // size) * size
        given.append(Slot(offset, size, pointer))
        end = offset + size
    asked = {
        "architecture": (declared.architecture, architecture),
        "symbol": (declared.symbol, symbol),
        "threads of a block": (declared.threads, threads),
        "threads of a wave": (declared.wave, machine.wave),
        "number of arguments": (len(declared.parameters), len(given)),
        "bytes of all arguments": (declared.parameters_bytes, end),
    }
    for index, (wanted, ours) in enumerate(zip(declared.parameters, given, strict=False)):
        asked[f"argument {index} ({[*kinds, 'scratch', 'scratch'][index]})"] = (wanted, ours)
    differences = [
        f"{what}: {theirs} in the code object, but {ours} in the launcher"
        for what, (theirs, ours) in asked.items()
        if theirs != ours
    ]
    if shared_bytes > machine.block_shared_bytes:
        differences.append(
            f"it needs {shared_bytes} bytes of shared memory, and a block has at most {machine.block_shared_bytes}"
        )
    if differences:
        raise BackendError(
            "; ".join(differences), "install the version of Triton that docs/ops.md names", f"code object of {symbol}"
        )


def sections(elf: ELFFile) -> dict[str, bytes]:
    """Return the content of each section by name, without sections that take no space in the file."""
    return {section.name: section.data() for section in elf.iter_sections() if section["sh_type"] != "SHT_NOBITS"}


def amd_metadata(elf: ELFFile) -> dict[str, Any]:
    """Return the code object's metadata, as defined in LLVM's "User Guide for AMDGPU Backend".

    Raises ValueError if the file's note is of another kind.
    """
    note = sections(elf)[".note"]
    owner_bytes, size, kind = struct.unpack_from("<3I", note)
    if kind != _NT_AMDGPU_METADATA:
        raise ValueError(f"its note has the unknown kind {kind}")
    begin = 12 + -(-owner_bytes // 4) * 4
    metadata: dict[str, Any] = msgpack.unpackb(note[begin : begin + size])
    return metadata


def _read_amd(elf: ELFFile) -> Declared:
    metadata = amd_metadata(elf)
    (kernel,) = metadata["amdhsa.kernels"]
    own = [argument for argument in kernel[".args"] if not argument[".value_kind"].startswith("hidden_")]
    parameters = tuple(Slot(a[".offset"], a[".size"], a[".value_kind"] == "global_buffer") for a in own)
    if kernel[".uses_dynamic_stack"] or kernel[".group_segment_fixed_size"]:
        raise ValueError("the kernel has a dynamic stack, or shared memory that the launcher does not allocate")
    return Declared(
        architecture=metadata["amdhsa.target"].rpartition("-")[2],
        symbol=kernel[".symbol"].removesuffix(".kd"),
        parameters=parameters,
        parameters_bytes=max(parameter.offset + parameter.size_bytes for parameter in parameters),
        threads=kernel[".max_flat_workgroup_size"],
        wave=kernel[".wavefront_size"],
        registers=kernel[".vgpr_count"],
        spills=kernel[".vgpr_spill_count"] + kernel[".sgpr_spill_count"],
        abi=elf["e_ident"]["EI_ABIVERSION"],
    )


def _read_nvidia(elf: ELFFile) -> Declared:
    content = sections(elf)
    (symbol,) = (name.removeprefix(".nv.info.") for name in content if name.startswith(".nv.info."))
    flags = elf["e_flags"]
    abi = elf["e_ident"]["EI_ABIVERSION"]
    found: dict[int, list[bytes]] = {}
    for name in (".nv.info", f".nv.info.{symbol}"):
        for attribute, payload in _attributes(content[name]):
            found.setdefault(attribute, []).append(payload)
    parameters = {}
    for payload in found[_PARAMETER]:
        _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
        parameters[ordinal] = Slot(offset, packed >> 18, packed >> 8 & 0xF == _GLOBAL_SPACE)
    # ptxas 12.4 writes this attribute more than once. The last entry is valid.
    (registers,) = struct.unpack("<4xI", found[_REGISTERS][-1])
    (stack,) = struct.unpack("<4xI", found[_STACK][-1])
    x, y, z = struct.unpack("<3I", found[_THREADS][-1])
    return Declared(
        # since ABI 8 other bits contain the architecture
        architecture=f"sm_{flags >> 8 & 0xFF if abi >= 8 else flags & 0xFF}",
        symbol=symbol,
        parameters=tuple(parameters[ordinal] for ordinal in range(len(parameters))),
        parameters_bytes=struct.unpack("<4xHH", found[_PARAMETER_BANK][-1])[1],
        threads=x * y * z,
        wave=32,
        registers=registers,
        spills=stack // 4,
        abi=abi,
    )


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (attribute, payload) of an .nv.info section. A value in the attribute's header has two bytes."""
    at = 0
    while at < len(section):
        form, attribute, value = struct.unpack_from("<BBH", section, at)
        size = value if form == _WITH_PAYLOAD else 0
        payload = section[at + 4 : at + 4 + size] if size else section[at + 2 : at + 4]
        yield attribute, payload
        at += 4 + size
