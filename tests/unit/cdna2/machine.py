"""Executes hand-written machine code (in llvm-objdump's text form) on the simulator, for tests of single
instructions.
"""

import numpy as np

from tests.cdna2 import Memory, Program, matrix, run, scalar, vector
from tests.cdna2.disassembly import Descriptor, parse
from tests.cdna2.state import Waves

DESCRIPTOR = Descriptor(vector_registers=64, accumulation_offset=32, kernarg_register=4, group_id_registers=(6, 7))
LANE = np.arange(64)


def program(text):
    """Build a kernel from these lines. A line `name:` is a label for branches."""
    lines = []
    labels = {}
    for line in (line.strip() for line in text.strip().splitlines()):
        if line.endswith(":"):
            labels[line[:-1]] = len(lines)
        else:
            lines.append(line)
    listing = []
    for place, line in enumerate(lines):
        name, _, target = line.partition(" ")
        offset = (labels[target] - place - 1) & 0xFFFF if "branch" in name else 0
        listing.append(f"\t{line}  // {4 * place:012X}: {0xBF820000 | offset:08X}")
    return Program("by_hand", parse("\n".join(listing)), DESCRIPTOR)


def execute(text, *tensors, grid=(1, 1, 1), threads=64, shared_bytes=0):
    """Run a kernel whose arguments are the arrays' addresses, loaded into s[8:9], s[10:11] …"""
    memory = Memory()
    addresses = [
        memory.add(f"tensor {place}", tensor.view(np.uint8).reshape(-1)) for place, tensor in enumerate(tensors)
    ]
    loads = [
        f"s_load_dwordx2 s[{8 + 2 * place}:{9 + 2 * place}], s[4:5], {8 * place:#x}" for place in range(len(tensors))
    ]
    whole = "\n".join([*loads, "s_waitcnt lgkmcnt(0)", text, "s_endpgm"])
    return run(program(whole), grid, threads, shared_bytes, np.array(addresses, np.uint64).tobytes(), memory)


def after(text, vector_registers=None, scalar_registers=None, mask=None, waves=1):
    """Return the state after a few instructions: vector and scalar registers, and the mask of active lanes."""
    state = Waves(DESCRIPTOR.vector_registers, 1, waves, 0)
    for register, values in (vector_registers or {}).items():
        state.vector[register] = np.broadcast_to(np.asarray(values), (64,)).view(np.uint32)
    for register, value in (scalar_registers or {}).items():
        state.scalar[register] = value
    if mask is not None:
        state.write_mask(126, np.broadcast_to(mask, (waves, 64)))
    for instruction in program(text).instructions:
        step = next(filter(None, (kind.step(instruction, DESCRIPTOR) for kind in (scalar, matrix, vector))))
        with np.errstate(all="ignore"):
            step(state)
    return state


def lanes(state, register, dtype=np.uint32):
    """Return one vector register of the first wave."""
    return state.vector[register, 0].copy().view(dtype)
