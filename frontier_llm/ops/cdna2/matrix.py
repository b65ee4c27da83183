"""Matrix instructions. A wave holds 32 x 8 of A, 8 x 32 of B and 32 x 32 of C in its lanes' registers."""

from __future__ import annotations

from typing import Final

import numpy as np

from .arithmetic import flush
from .disassembly import Descriptor, Instruction
from .operands import Operand, Unknown, operand
from .scalar import Step
from .state import LANES, Array, Waves

_M: Final = 32  # and N
_K: Final = 8
_RESULTS: Final = _M * _M // LANES
_HALVES: Final = {"v_mfma_f32_32x32x8f16": np.float16, "v_mfma_f32_32x32x8bf16_1k": None}  # None: the upper half of a float32

# A's row or B's column is the lane's number modulo 32; lanes 32-63 have the second half of K, four values in two registers.
# C's column is that of the lane; its rows come in fours, which lanes 0-31 and 32-63 have in turn.
_LANE, _REGISTER = np.arange(LANES)[None, :], np.arange(_RESULTS)[:, None]
ROWS: Final = 8 * (_REGISTER // 4) + 4 * (_LANE // _M) + _REGISTER % 4
COLUMNS: Final = np.broadcast_to(_LANE % _M, ROWS.shape)


def step(instruction: Instruction, descriptor: Descriptor) -> Step | None:
    """What the instruction does to the chosen waves; None when it is not a matrix instruction.

    Subnormal inputs and outputs are zeros on MI200 (MIOpen: MI200 MFMA behavior specifics). Sums are taken in float64 and rounded once;
    hardware rounds more often, in an order that is not documented. The execution mask has no say.
    """
    if instruction.mnemonic not in _HALVES:
        return None
    if instruction.modifiers:
        raise Unknown(f"modifiers {instruction.modifiers}")
    half = _HALVES[instruction.mnemonic]
    d, a, b, c = (operand(text, descriptor) for text in instruction.operands)
    if not (d.vector and a.vector and b.vector) or (d.count, a.count, b.count) != (_RESULTS, 2, 2) or c.count not in (0, _RESULTS):
        raise Unknown(f"operands {instruction.operands}")
    if c.register < 0 and c.number:
        raise Unknown(f"operand {c.text}")

    def run(waves: Waves) -> None:
        left = _inputs(waves, a, half)  # [wave, row, k]
        right = _inputs(waves, b, half)  # [wave, column, k]
        product = left @ right.swapaxes(1, 2)
        values = product[:, ROWS, COLUMNS].swapaxes(0, 1)  # [register, wave, lane]
        if c.register >= 0:
            values = values + flush(waves.vector[c.register : c.register + _RESULTS, waves.chosen].view(np.float32))
        waves.vector[d.register : d.register + _RESULTS, waves.chosen] = flush(values.astype(np.float32)).view(np.uint32)

    return run


def _inputs(waves: Waves, source: Operand, half: type[np.float16] | None) -> Array:
    """A, or B transposed, as float64 [wave, row or column, k]."""
    words = waves.vector[source.register : source.register + 2, waves.chosen]  # [2, wave, lane]
    halves = np.ascontiguousarray(words.transpose(1, 2, 0)).view(np.uint16)  # [wave, lane, 4]
    values = flush(halves.view(half) if half else (halves.astype(np.uint32) << np.uint32(16)).view(np.float32))
    by_half = values.reshape(-1, 2, _M, _K // 2)  # lanes as (half of K, row)
    return by_half.swapaxes(1, 2).reshape(-1, _M, _K).astype(np.float64)
