"""Emulates the matrix instructions (MFMA). A wave's lanes hold 32 x 8 of A, 8 x 32 of B and 32 x 32 of C in registers,
or 16 x 16 of each.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .arithmetic import flush
from .disassembly import Descriptor, Instruction
from .operands import Operand, Unknown, operand
from .scalar import Step
from .state import LANES, Array, Waves

_EACH: Final = 4  # number of values of A, and of B, in a lane; they are consecutive in K.
# Number of rows and columns of the result, and the type of A and B (None: bf16, the upper half of a float32)
_KINDS: Final[dict[str, tuple[int, type[np.float16] | None]]] = {
    "v_mfma_f32_32x32x8f16": (32, np.float16),
    "v_mfma_f32_32x32x8bf16_1k": (32, None),
    "v_mfma_f32_16x16x16f16": (16, np.float16),
    "v_mfma_f32_16x16x16bf16_1k": (16, None),
}


def layout(size: int) -> tuple[Array, Array]:
    """Return the row and the column of the result in each [register, lane].

    The column is the lane number modulo `size`. Each run of `size` lanes is a part of the wave and holds all columns.
    Rows are in groups of four consecutive rows, and the parts of the wave take the groups one after the other. A's row
    and B's column are also the lane number modulo `size`, and each part of the wave has four values of K.
    """
    lane = np.arange(LANES)[None, :]
    register = np.arange(size * size // LANES)[:, None]
    rows = 4 * (LANES // size) * (register // 4) + 4 * (lane // size) + register % 4
    return rows, np.broadcast_to(lane % size, rows.shape)


def step(instruction: Instruction, descriptor: Descriptor) -> Step | None:
    """Return the function that executes the instruction on the chosen waves, or None if it is no matrix instruction.

    Subnormal inputs and outputs are zeros on MI200 (MIOpen: MI200 MFMA behavior specifics). Sums are computed in
    float64 and rounded once. Hardware rounds more often, in an order that is not documented. The execution mask has no
    effect.
    """
    if instruction.mnemonic not in _KINDS:
        return None
    if instruction.modifiers:
        raise Unknown(f"modifiers {instruction.modifiers}")
    size, half = _KINDS[instruction.mnemonic]
    results = size * size // LANES
    rows, columns = layout(size)
    d, a, b, c = (operand(text, descriptor) for text in instruction.operands)
    if (
        not (d.vector and a.vector and b.vector)
        or (d.count, a.count, b.count) != (results, 2, 2)
        or c.count not in (0, results)
    ):
        raise Unknown(f"operands {instruction.operands}")
    if c.register < 0 and c.number:
        raise Unknown(f"operand {c.text}")

    def run(waves: Waves) -> None:
        left = _inputs(waves, a, size, half)  # [wave, row, k]
        right = _inputs(waves, b, size, half)  # [wave, column, k]
        product = left @ right.swapaxes(1, 2)
        values = product[:, rows, columns].swapaxes(0, 1)  # [register, wave, lane]
        if c.register >= 0:
            values = values + flush(waves.vector[c.register : c.register + results, waves.chosen].view(np.float32))
        waves.vector[d.register : d.register + results, waves.chosen] = flush(values.astype(np.float32)).view(np.uint32)

    return run


def _inputs(waves: Waves, source: Operand, size: int, half: type[np.float16] | None) -> Array:
    """Return A, or B transposed, as float64 [wave, row or column, k]."""
    words = waves.vector[source.register : source.register + 2, waves.chosen]  # [2, wave, lane]
    halves = np.ascontiguousarray(words.transpose(1, 2, 0)).view(np.uint16)  # [wave, lane, 4]
    values = flush(halves.view(half) if half else (halves.astype(np.uint32) << np.uint32(16)).view(np.float32))
    parts = values.reshape(-1, LANES // size, size, _EACH)  # lanes as (part of the wave, row)
    return parts.swapaxes(1, 2).reshape(len(values), size, -1).astype(np.float64)
