"""Disassembles a code object: parses llvm-objdump's text into instructions, and reads the kernel descriptor."""

from __future__ import annotations

import io
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from .fault import SimulatorError

_LINE = re.compile(r"^\s+(?P<text>[a-z]\S*(?: .*?)?)\s*// (?P<address>[0-9A-F]+): (?P<words>[0-9A-F ]+)")
_ENCODING = re.compile(r"_(e32|e64|sdwa|dpp)$")
_BRANCH = re.compile(r"s_c?branch_?\w*$")
_PRESERVE_DENORMALS = 0xF0  # value of the 8-bit float mode: round to nearest even and keep subnormals, in every type


@dataclass(frozen=True)
class Instruction:
    """One line of the disassembly. `mnemonic` lacks the encoding's suffix (such as _e32). `words` are machine code."""

    address: int
    mnemonic: str
    encoding: str
    operands: tuple[str, ...]
    modifiers: dict[str, str]
    text: str
    target: int = -1  # index of the instruction that a branch leads to


@dataclass(frozen=True)
class Descriptor:
    """The registers that the command processor initialises before a kernel starts, and the number of registers.

    Source: LLVM, "Kernel Descriptor for GFX90A".
    """

    vector_registers: int  # ordinary and accumulation registers together
    accumulation_offset: int  # index of the first accumulation register
    kernarg_register: int  # first of two scalar registers with the arguments' address
    group_id_registers: tuple[int, ...]  # registers of the workgroup's x, y and z, if the kernel uses them


@dataclass(frozen=True, eq=False)
class Program:
    """A disassembled kernel, which `simulator.run` executes."""

    symbol: str
    instructions: tuple[Instruction, ...]
    descriptor: Descriptor


def disassemble(image: bytes, symbol: str) -> Program:
    """Return the kernel of a gfx90a code object. Raises SimulatorError if llvm-objdump is missing, or if the object has
    settings that the simulator does not know.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.hsaco"
        path.write_bytes(image)
        command = [find_objdump(), "-d", "--mcpu=gfx90a", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise SimulatorError(
            f"llvm-objdump cannot read it: {done.stderr.strip()}", "take LLVM 14 or later", f"code object of {symbol}"
        )
    return Program(symbol, parse(done.stdout), _descriptor(image, symbol))


@cache
def find_objdump() -> str:
    """Return the path of llvm-objdump. Without it, raise SimulatorError, which names the package to install."""
    rocm = [Path("/opt/rocm")]
    if compiler := shutil.which("hipcc"):  # ROCm's module puts its bin folder on PATH, but not always LLVM's
        rocm.insert(0, Path(compiler).resolve().parents[1])
    folders = [None, *(str(folder / "llvm" / "bin") for folder in rocm)]  # None is PATH
    names = ["llvm-objdump", *(f"llvm-objdump-{version}" for version in range(25, 13, -1))]
    for folder in folders:
        for name in names:
            if found := shutil.which(name, path=folder):
                return found
    raise SimulatorError(
        "llvm-objdump is neither on PATH nor in ROCm",
        "apt-get install llvm, or load the rocm module",
        "simulator of gfx90a",
    )


def parse(listing: str) -> tuple[Instruction, ...]:
    """Return the instructions of a disassembly, with the target of each branch as an index."""
    lines = [line for line in map(_LINE.match, listing.splitlines()) if line]
    index = {int(line["address"], 16): position for position, line in enumerate(lines)}
    instructions = []
    for line in lines:
        address = int(line["address"], 16)
        instructions.append(_instruction(line["text"], address, line["words"].split(), index))
    return tuple(instructions)


def _instruction(text: str, address: int, words: list[str], index: dict[int, int]) -> Instruction:
    name, _, rest = text.partition(" ")
    encoding = _ENCODING.search(name)
    tokens = rest.split()
    operands = []
    while tokens:
        operands.append(tokens[0].removesuffix(","))
        if not tokens.pop(0).endswith(","):
            break
    target = -1
    if _BRANCH.match(name):
        offset = int(words[0], 16) & 0xFFFF
        target = index[address + 4 + 4 * ((offset ^ 0x8000) - 0x8000)]
    if name == "s_waitcnt":
        operands = []
        tokens = [token.replace("(", ":").removesuffix(")") for token in rest.split()]
    modifiers = {}
    for token in tokens:
        modifier, _, value = token.partition(":")
        modifiers[modifier] = value
    return Instruction(
        address=address,
        mnemonic=name[: encoding.start()] if encoding else name,
        encoding=encoding[1] if encoding else "",
        operands=tuple(operands),
        modifiers=modifiers,
        text=text,
        target=target,
    )


def _descriptor(image: bytes, symbol: str) -> Descriptor:
    elf: Any = ELFFile(io.BytesIO(image))
    section = elf.get_section_by_name(".rodata")
    data = section.data() if section else b""
    if len(data) != 64:
        raise SimulatorError(
            f"{len(data)} bytes where a kernel descriptor of 64 should be", where=f"code object of {symbol}"
        )
    rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<3I2H", data, 44)
    # private segment buffer, dispatch pointer and queue pointer occupy the registers below the arguments' address
    before = sum(size for bit, size in enumerate((4, 2, 2)) if properties >> bit & 1)
    user = rsrc2 >> 1 & 0x1F
    known = {
        "float mode": (rsrc1 >> 12 & 0xFF, _PRESERVE_DENORMALS),
        "kernel code properties (private segment buffer, arguments' address)": (properties & ~1, 8),
        "scalar registers that the arguments are loaded into": (user - before - 2, preload & 0x7F),
        "work-item ids in v0": (rsrc2 >> 11 & 3, 0),
        "private segment": (rsrc2 & 1, 0),
    }
    unknown = [
        f"{what}: {found:#x}, the simulator knows {ours:#x}" for what, (found, ours) in known.items() if found != ours
    ]
    if unknown:
        raise SimulatorError("; ".join(unknown), where=f"code object of {symbol}")
    ids = tuple(user + place for place in range(sum(rsrc2 >> bit & 1 for bit in (7, 8, 9))))
    return Descriptor(8 * ((rsrc1 & 0x3F) + 1), 4 * ((rsrc3 & 0x3F) + 1), before, ids)
