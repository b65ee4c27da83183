"""What a code object itself says of its kernel, and whether that is what the launcher gives it.

Read from the ELF file: AMD's metadata note (msgpack) or NVIDIA's .nv.info sections. Needs no Triton and no vendor's tool.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from frontier_llm.errors import BackendError
from frontier_llm.ops.kernel_table import ARCHITECTURES

_AMD, _NVIDIA = 224, 190  # e_machine
_NT_AMDGPU_METADATA = 32
# NVIDIA's attributes: of a kernel, then of the whole file (each there begins with the symbol's index)
_PARAMETER, _THREADS, _PARAMETER_BANK = 0x17, 0x10, 0x0A
_REGISTERS, _STACK = 0x2F, 0x12
_WITH_PAYLOAD, _GLOBAL_SPACE = 4, 4
_BYTES = {"i32": 4, "fp32": 4, "i64": 8}  # a pointer has 8


@dataclass(frozen=True)
class Parameter:
    """One argument in the buffer that the driver fills."""

    offset: int
    size_bytes: int
    pointer: bool


@dataclass(frozen=True)
class Hidden:
    """One argument that AMD's driver fills by itself, by the metadata's name for it: hidden_block_count_x …"""

    kind: str
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Declared:
    """A kernel's own account of how it must be launched and of what it uses."""

    architecture: str
    symbol: str
    parameters: tuple[Parameter, ...]
    parameters_bytes: int  # what the driver copies; on AMD without the hidden ones, which it fills itself
    threads: int  # of a block
    wave: int
    registers: int  # of a thread; AMD: vector registers with the accumulation registers
    spills: int  # AMD: registers; NVIDIA: words on a thread's stack
    hidden: tuple[Hidden, ...] = ()


def read(image: bytes) -> Declared:
    """The only kernel of a code object. Raises BackendError for a file that does not say what is asked of it."""
    try:
        machine = struct.unpack_from("<H", image, 18)[0] if image[:4] == b"\x7fELF" else 0
        if machine == _AMD:
            return _read_amd(image)
        if machine == _NVIDIA:
            return _read_nvidia(image)
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise BackendError(f"a code object that cannot be read: {type(error).__name__}: {error}") from error
    raise BackendError("not a code object of AMD's or NVIDIA's")


def check_launch(declared: Declared, architecture: str, symbol: str, kinds: Sequence[str], threads: int, shared_bytes: int) -> None:
    """The kernel wants what csrc/gpu_launcher.cpp gives: these arguments and two scratch pointers, in blocks that the machine can have.

    `kinds` are the arguments' types in launch order. Raises BackendError that names every difference.
    """
    machine = ARCHITECTURES[architecture]
    pointers = [kind.startswith("*") for kind in kinds] + [True, True]
    given, end = [], 0
    for pointer, size in zip(pointers, [*(_BYTES.get(kind, 8) for kind in kinds), 8, 8], strict=True):
        offset = -(-end // size) * size
        given.append(Parameter(offset, size, pointer))
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
        f"{what}: the code object says {theirs}, the launcher gives {ours}" for what, (theirs, ours) in asked.items() if theirs != ours
    ]
    if shared_bytes > machine.block_shared_bytes:
        differences.append(f"{shared_bytes} bytes of shared memory: a block has at most {machine.block_shared_bytes}")
    if differences:
        raise BackendError("; ".join(differences), "use the Triton that docs/ops.md names", f"code object of {symbol}")


def sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names_index = struct.unpack_from("<3H", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + size * index) for index in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, length in headers:
        begin = names + name
        if kind != 8:  # one that takes no room in the file
            yield image[begin : image.index(b"\0", begin)].decode(), image[offset : offset + length]


def _read_amd(image: bytes) -> Declared:
    note = dict(sections(image))[".note"]
    owner_bytes, size, kind = struct.unpack_from("<3I", note)
    if kind != _NT_AMDGPU_METADATA:
        raise ValueError(f"a note of kind {kind}")
    begin = 12 + -(-owner_bytes // 4) * 4
    metadata, _ = _unpack(note[begin : begin + size], 0)
    (kernel,) = metadata["amdhsa.kernels"]
    own: list[dict[str, Any]] = []
    hidden: list[dict[str, Any]] = []
    for argument in kernel[".args"]:
        (hidden if argument[".value_kind"].startswith("hidden_") else own).append(argument)
    parameters = tuple(Parameter(a[".offset"], a[".size"], a[".value_kind"] == "global_buffer") for a in own)
    if kernel[".uses_dynamic_stack"] or kernel[".group_segment_fixed_size"]:
        raise ValueError("a kernel with a dynamic stack, or with shared memory that is not the launcher's to give")
    return Declared(
        architecture=metadata["amdhsa.target"].rpartition("-")[2],
        symbol=kernel[".symbol"].removesuffix(".kd"),
        parameters=parameters,
        parameters_bytes=max(parameter.offset + parameter.size_bytes for parameter in parameters),
        threads=kernel[".max_flat_workgroup_size"],
        wave=kernel[".wavefront_size"],
        registers=kernel[".vgpr_count"],
        spills=kernel[".vgpr_spill_count"] + kernel[".sgpr_spill_count"],
        hidden=tuple(Hidden(a[".value_kind"], a[".offset"], a[".size"]) for a in hidden),
    )


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """The msgpack value at a position, and where the next one begins; the types that LLVM writes."""
    tag = data[at]
    at += 1
    wide = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # integers
    counted = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # strings, lists, maps
    if tag < 0x80:
        return tag, at
    if tag in (0xC2, 0xC3):
        return tag == 0xC3, at
    if tag in wide:
        return int.from_bytes(data[at : at + wide[tag]], "big"), at + wide[tag]
    if tag in counted:
        count, at = int.from_bytes(data[at : at + counted[tag]], "big"), at + counted[tag]
    elif tag < 0xC0:
        count = tag & (0x1F if tag >= 0xA0 else 0x0F)
    else:
        raise ValueError(f"msgpack tag {tag:#x}")
    if tag in (0xD9, 0xDA, 0xDB) or 0xA0 <= tag < 0xC0:
        return data[at : at + count].decode(), at + count
    items, is_map = [], tag in (0xDE, 0xDF) or tag < 0x90
    for _ in range(count * (1 + is_map)):
        item, at = _unpack(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if is_map else items), at


def _read_nvidia(image: bytes) -> Declared:
    content = dict(sections(image))
    (symbol,) = (name.removeprefix(".nv.info.") for name in content if name.startswith(".nv.info."))
    (flags,) = struct.unpack_from("<I", image, 48)
    found: dict[int, list[bytes]] = {}
    for name in (".nv.info", f".nv.info.{symbol}"):
        for attribute, payload in _attributes(content[name]):
            found.setdefault(attribute, []).append(payload)
    parameters = {}
    for payload in found[_PARAMETER]:
        _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
        parameters[ordinal] = Parameter(offset, packed >> 18, packed >> 8 & 0xF == _GLOBAL_SPACE)
    ((registers,), (stack,)) = (struct.unpack("<4xI", *found[attribute]) for attribute in (_REGISTERS, _STACK))
    x, y, z = struct.unpack("<3I", *found[_THREADS])
    return Declared(
        architecture=f"sm_{flags >> 8 & 0xFF if image[8] >= 8 else flags & 0xFF}",  # its place changed with ABI 8
        symbol=symbol,
        parameters=tuple(parameters[ordinal] for ordinal in range(len(parameters))),
        parameters_bytes=struct.unpack("<4xHH", *found[_PARAMETER_BANK])[1],
        threads=x * y * z,
        wave=32,
        registers=registers,
        spills=stack // 4,
    )


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of an .nv.info section; those whose value is in the header come with those two bytes."""
    at = 0
    while at < len(section):
        form, attribute, value = struct.unpack_from("<BBH", section, at)
        size = value if form == _WITH_PAYLOAD else 0
        yield attribute, section[at + 4 : at + 4 + size] if size else section[at + 2 : at + 4]
        at += 4 + size
