"""Emulates the instructions that read and write memory: global, buffer, scalar and LDS (a GPU's shared memory)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .disassembly import Descriptor, Instruction
from .fault import Violation
from .global_memory import Memory
from .local_memory import LocalMemory
from .operands import Operand, Read, Unknown, operand, reader
from .state import LANES, Array, Waves

_SIZES: Final[dict[str, tuple[Any, int]]] = {
    "ushort": (np.uint16, 1),
    "short": (np.uint16, 1),
    "dword": (np.uint32, 1),
    "dwordx2": (np.uint32, 2),
    "dwordx3": (np.uint32, 3),
    "dwordx4": (np.uint32, 4),
}
_LOCAL_SIZES: Final[dict[str, tuple[Any, int]]] = {
    "u8": (np.uint8, 1),  # bytes are only read: writing half a cell of the race check would be reported as a race
    "u16": (np.uint16, 1),
    "b16": (np.uint16, 1),
    "b32": (np.uint32, 1),
    "b64": (np.uint32, 2),
    "b128": (np.uint32, 4),
}
_GLOBAL = re.compile(r"(?P<space>global|buffer)_(?P<action>load|store)_(?P<size>[a-z]+(?:x\d)?)(?P<high>_d16_hi)?$")
_LOCAL = re.compile(r"ds_(?P<action>read|write)(?P<two>2?)(?P<far>st64)?_(?P<size>[ub]\d+)(?P<high>_d16_hi)?$")
_SCALAR = re.compile(r"s_load_dword(?:x(?P<count>\d+))?$")


@dataclass(frozen=True)
class Places:
    """The memories that an instruction can access."""

    memory: Memory
    local: LocalMemory


@dataclass(frozen=True)
class Access:
    """A memory instruction: its step, the counter of s_waitcnt that counts it ("vm" or "lgkm"), the registers that it
    loads, and the bytes per lane.
    """

    step: Callable[[Waves, Places], None]
    counter: str
    loads: frozenset[tuple[bool, int]]
    size: int
    scalar: bool = False


def access(instruction: Instruction, descriptor: Descriptor) -> Access | None:
    """Return the memory access that an instruction makes, or None if it is no memory instruction."""
    name = instruction.mnemonic
    operands = [operand(text, descriptor) for text in instruction.operands if text != "off"]
    modifiers = dict(instruction.modifiers)
    if found := _GLOBAL.match(name):
        address = (
            _buffer_address(operands, modifiers)
            if found["space"] == "buffer"
            else _global_address(instruction, operands, modifiers)
        )
        made = _global(found, operands, address)
    elif found := _LOCAL.match(name):
        made = _local(found, operands, modifiers)
    elif found := _SCALAR.match(name):
        made = _scalar(operands, int(found["count"] or 1))
    elif name == "ds_bpermute_b32":
        made = _permute(operands)
    else:
        return None
    if modifiers:
        raise Unknown(f"modifiers {modifiers}")
    return made


def _take(modifiers: dict[str, str], name: str) -> int:
    return int(modifiers.pop(name, "0"), 0)


Address = Callable[[Waves, int], tuple[Array, Array]]  # (waves, bytes) -> (each lane's address, whether it is accessed)


def _global_address(instruction: Instruction, operands: list[Operand], modifiers: dict[str, str]) -> Address:
    """Read the address: 64 bits per lane, or a base in scalar registers plus an offset of 32 bits per lane."""
    offset = _take(modifiers, "offset")
    if instruction.operands[-1] == "off":
        place = 0 if "store" in instruction.mnemonic else 1
        read = reader(operands[place], "i64", per_lane=True)
        return lambda waves, size: (read(waves) + offset, waves.lanes)
    place = 0 if "store" in instruction.mnemonic else 1
    inner = reader(operands[place], "u32", per_lane=True)
    base = reader(operands[-1], "i64", per_lane=True)
    return lambda waves, size: (base(waves) + inner(waves) + offset, waves.lanes)


def _buffer_address(operands: list[Operand], modifiers: dict[str, str]) -> Address:
    """Address a raw buffer. Four scalar registers have its base, stride and size. Outside of the buffer a load returns
    0 and a store writes nothing.
    """
    if "offen" not in modifiers or operands[3].register >= 0 or operands[3].number:
        raise Unknown("a buffer access without offen, or with a scalar offset")
    modifiers.pop("offen")
    offset = _take(modifiers, "offset")
    inner = reader(operands[1], "u32", per_lane=True)
    first = operands[2].register

    def address(waves: Waves, size: int) -> tuple[Array, Array]:
        low, high, records, _ = (
            waves.scalar[first + word, waves.chosen].astype(np.int64)[:, None] for word in range(4)
        )
        if (high >> 16).any():
            raise Violation("a buffer with a stride, which the simulator does not know")
        relative = inner(waves).astype(np.int64) + offset
        return low + (high << 32) + relative, waves.lanes & (relative + size <= records)

    return address


def _global(found: re.Match[str], operands: list[Operand], address: Address) -> Access:
    dtype, count = _SIZES[found["size"]]
    size = np.dtype(dtype).itemsize * count
    if found["high"] and found["action"] == "load":
        raise Unknown("a load into the high half")
    if found["action"] == "load":
        destination = _data(operands[0], count)

        def load(waves: Waves, places: Places) -> None:
            addresses, where = address(waves, size)
            values = places.memory.load(addresses, where, dtype, count).astype(np.uint32)
            for place in range(count):
                waves.write_vector(destination.register + place, values[..., place])

        return Access(load, "vm", destination.rows, size)
    data = _data(operands[0 if found["space"] == "buffer" else 1], count)
    shift = np.uint32(16 if found["high"] else 0)

    def store(waves: Waves, places: Places) -> None:
        addresses, where = address(waves, size)
        places.memory.store(addresses, where, (_stacked(waves, data) >> shift).astype(dtype))

    return Access(store, "vm", frozenset(), size)


def _data(source: Operand, count: int) -> Operand:
    if not source.vector or source.count != count:
        raise Unknown(f"{source.text} for {count} words")
    return source


def _stacked(waves: Waves, source: Operand) -> Array:
    """Return the values of consecutive registers as [wave, lane, word]."""
    return np.moveaxis(waves.vector[source.register : source.register + source.count, waves.chosen], 0, -1)


def _local(found: re.Match[str], operands: list[Operand], modifiers: dict[str, str]) -> Access:
    dtype, count = _LOCAL_SIZES[found["size"]]
    width = np.dtype(dtype).itemsize * count
    two = bool(found["two"])
    unit = width * (64 if found["far"] else 1)
    offsets = (
        [unit * _take(modifiers, "offset0"), unit * _take(modifiers, "offset1")]
        if two
        else [_take(modifiers, "offset")]
    )
    reads = found["action"] == "read"
    if reads and found["high"]:
        raise Unknown("a load into the high half")
    base = reader(operands[1 if reads else 0], "u32", per_lane=True)

    def addresses(waves: Waves, offset: int) -> Array:
        return np.broadcast_to(base(waves).astype(np.int64) + offset, (len(waves.waves), LANES))

    if reads:
        destination = _data(operands[0], count * len(offsets))

        def load(waves: Waves, places: Places) -> None:
            values = [places.local.load(waves, addresses(waves, offset), dtype, count) for offset in offsets]
            for place, word in enumerate(value[..., i].astype(np.uint32) for value in values for i in range(count)):
                waves.write_vector(destination.register + place, word)

        return Access(load, "lgkm", destination.rows, width * len(offsets))
    data = [_data(source, count) for source in operands[1:]]
    shift = np.uint32(16 if found["high"] else 0)

    def store(waves: Waves, places: Places) -> None:
        for source, offset in zip(data, offsets, strict=True):
            places.local.store(waves, addresses(waves, offset), (_stacked(waves, source) >> shift).astype(dtype))

    return Access(store, "lgkm", frozenset(), width * len(offsets))


def _permute(operands: list[Operand]) -> Access:
    """ds_bpermute_b32: each lane reads another lane's register through the LDS hardware. An inactive lane gives 0."""
    destination, lane, source = operands
    which = reader(lane, "u32", per_lane=True)
    values = reader(source, "u32", per_lane=True)

    def step(waves: Waves, places: Places) -> None:
        given = np.where(waves.lanes, values(waves), np.uint32(0))
        waves.write_vector(
            destination.register, np.take_along_axis(given, (which(waves) >> np.uint32(2) & 63).astype(np.intp), axis=1)
        )

    return Access(step, "lgkm", destination.rows, 4)


def _scalar(operands: list[Operand], count: int) -> Access:
    destination, base, offset = operands
    if destination.count != count or offset.register >= 0:
        raise Unknown(f"{destination.text}, {offset.text}")
    read: Read = reader(base, "i64", per_lane=False)
    by: Any = int(offset.number)

    def step(waves: Waves, places: Places) -> None:
        addresses = (read(waves) + by)[:, None]
        values = places.memory.load(addresses, np.ones(addresses.shape, bool), np.uint32, count)
        for place in range(count):
            waves.write_scalar(destination.register + place, values[:, 0, place])

    return Access(step, "lgkm", destination.rows, 4 * count, scalar=True)
