"""Emulates vector instructions: reads the operands, applies a function of `vector_table`, and writes the active lanes'
results.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from .arithmetic import fma
from .disassembly import Descriptor, Instruction
from .lanes import PARTS, FromOtherLanes, part
from .masks import OTHERS, compare, lanes_of, readers, write
from .operands import Operand, Read, Unknown, operand, reader, split, writable
from .scalar import Step
from .state import Array, Waves
from .vector_table import COMPARE, PACKED, TABLE


def step(instruction: Instruction, descriptor: Descriptor) -> Step | None:
    """Return the function that executes the instruction on the chosen waves, or None if it is no vector instruction."""
    name = instruction.mnemonic
    operands = [operand(text, descriptor) for text in instruction.operands]
    if name in TABLE or name in ("v_cndmask_b32",):
        return _simple(instruction, operands)
    if name in PACKED or name == "v_pk_mov_b32":
        return _packed(instruction, operands)
    if name.startswith("v_fma_mix"):
        return _mixed(instruction, operands)
    if instruction.modifiers and (name in COMPARE or name in OTHERS):
        raise Unknown(f"modifiers {instruction.modifiers}")
    if name in COMPARE:
        return compare(name, operands)
    return OTHERS[name](operands) if name in OTHERS else None


def _simple(instruction: Instruction, operands: list[Operand]) -> Step:
    """Compile an instruction of TABLE, in any encoding, or v_cndmask_b32."""
    if instruction.mnemonic == "v_cndmask_b32":
        *operands, mask = operands
        choice = lanes_of(mask)
        result = "u32"
        kinds = ["u32", "u32"]
        function = None
    else:
        op = TABLE[instruction.mnemonic]
        result = op.result
        function = op.function
        kinds = [op.result if kind == "dst" else kind for kind in op.sources]
    destination, *sources = operands if function is None or "dst" not in op.sources else [operands[0], *operands]
    writable(destination, result)
    modifiers = dict(instruction.modifiers)
    dpp = None
    place = "DWORD"
    if instruction.encoding == "sdwa":
        place = modifiers.pop("dst_sel", place)
        if modifiers.pop("dst_unused", "UNUSED_PAD") != "UNUSED_PAD" or (place != "DWORD" and result != "u32"):
            raise Unknown(f"modifiers {instruction.modifiers}")
        reads = [
            part(source, modifiers.pop(f"src{place}_sel"), kind, reader(source, "u32", per_lane=True))
            for place, (source, kind) in enumerate(zip(sources, kinds, strict=True))
        ]
    else:
        reads = readers(sources, kinds)
    if instruction.encoding == "dpp":
        dpp = FromOtherLanes(modifiers)
        modifiers = {}
        reads[0] = dpp.through(reads[0])
    if modifiers:
        raise Unknown(f"modifiers {modifiers}")

    first, width = PARTS[place]

    def run(waves: Waves) -> None:
        values = [read(waves) for read in reads]
        value = np.where(choice(waves), values[1], values[0]) if function is None else function(*values)
        words = split(value, result)
        if width < 32:  # SDWA: only a byte or a half of the register gets the result; the rest becomes 0
            words = [(words[0] & np.uint32((1 << width) - 1)) << np.uint32(first)]
        write(waves, destination, words, dpp.written(waves) if dpp else None)

    return run


def _flags(instruction: Instruction, name: str, count: int, default: int) -> list[bool]:
    """Return the bits of a modifier such as op_sel:[1,0]."""
    text = instruction.modifiers.get(name)
    return [bool(int(bit)) for bit in text.strip("[]").split(",")] if text else [bool(default)] * count


def _only(instruction: Instruction, *names: str) -> None:
    unknown = set(instruction.modifiers) - set(names)
    if unknown:
        raise Unknown(f"modifiers {unknown}")


def _packed(instruction: Instruction, operands: list[Operand]) -> Step:
    """Compile v_pk_*. op_sel and neg_lo apply to the low result, op_sel_hi and neg_hi to the high result."""
    destination, *sources = operands
    count = len(sources)
    move = instruction.mnemonic == "v_pk_mov_b32"
    kind, function = ("u32", None) if move else PACKED[instruction.mnemonic]
    _only(instruction, "op_sel", *(() if move else ("op_sel_hi", "neg_lo", "neg_hi")))
    chosen = [_flags(instruction, "op_sel", count, 0), _flags(instruction, "op_sel_hi", count, 1)]
    negated = [_flags(instruction, name, count, 0) for name in ("neg_lo", "neg_hi")]

    def half(source: Operand, high: bool, negate: bool) -> Read:
        if source.register < 0:
            if high and source.number:
                raise Unknown(f"the high half of {source.text}")
            read = reader(source, kind, per_lane=True)
        elif kind == "f16":
            read = part(source, f"WORD_{high:d}", kind, reader(source, "u32", per_lane=True))
        else:
            read = reader(
                replace(source, register=source.register + high, count=source.count // 2), kind, per_lane=True
            )
        return (lambda waves: np.negative(read(waves))) if negate else read

    if move:
        low, high = (half(source, select, False) for source, select in zip(sources, chosen[0], strict=True))
        # a copy, because `high` may return a view of the register, which the low result may overwrite
        return lambda waves: write(waves, destination, [low(waves), high(waves).copy()])
    reads = [[half(*of) for of in zip(sources, chosen[place], negated[place], strict=True)] for place in (0, 1)]
    assert function

    def run(waves: Waves) -> None:
        words = [split(function(*(read(waves) for read in of)), kind)[0] for of in reads]
        write(waves, destination, [words[0] | words[1] << np.uint32(16)] if kind == "f16" else words)

    return run


def _mixed(instruction: Instruction, operands: list[Operand]) -> Step:
    """Compile v_fma_mix_f32, v_fma_mixlo_f16 or v_fma_mixhi_f16. A bit of op_sel_hi makes a source fp16; then op_sel
    selects its high half.
    """
    _only(instruction, "op_sel", "op_sel_hi")
    destination, *sources = operands
    high = _flags(instruction, "op_sel", 3, 0)
    halves = _flags(instruction, "op_sel_hi", 3, 0)
    reads: list[Read] = []
    for source, upper, half in zip(sources, high, halves, strict=True):
        if half and source.register >= 0:
            if source.absolute:
                raise Unknown(f"operand {source.text}")
            read = part(
                replace(source, negate=False),
                f"WORD_{upper:d}",
                "f16",
                reader(replace(source, negate=False), "u32", per_lane=True),
            )
            sign = np.float32(-1 if source.negate else 1)
            reads.append(partial(_widened, read, sign))
        else:
            reads.append(reader(source, "f16" if half else "f32", per_lane=True))
    target = instruction.mnemonic.removeprefix("v_fma_mix")

    def run(waves: Waves) -> None:
        value = fma(*(read(waves).astype(np.float32) for read in reads))
        if target == "_f32":
            write(waves, destination, split(value, "f32"))
            return
        word = split(value, "f16")[0]
        old = waves.vector[destination.register, waves.chosen]
        kept = (
            old & np.uint32(0xFFFF0000) | word
            if target == "lo_f16"
            else old & np.uint32(0xFFFF) | word << np.uint32(16)
        )
        write(waves, destination, [kept])

    if target not in ("_f32", "lo_f16", "hi_f16"):
        raise Unknown("instruction")
    return run


def _widened(read: Read, sign: np.float32, waves: Waves) -> Array:
    return read(waves).astype(np.float32) * sign
