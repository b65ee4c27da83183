"""How a vector instruction becomes a step: operands read, the function applied, the result written where the execution mask is set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from .arithmetic import div_fmas, div_scale, fma
from .disassembly import Descriptor, Instruction
from .lanes import FromOtherLanes, part
from .operands import Operand, Read, Unknown, operand, reader, split
from .scalar import Step
from .state import VCC, Array, Waves, as_lanes
from .vector_table import COMPARE, PACKED, TABLE

_SDWA_DEFAULTS: Final = {"dst_sel": "DWORD", "dst_unused": "UNUSED_PAD"}


def step(instruction: Instruction, descriptor: Descriptor) -> Step | None:
    """What the instruction does to the chosen waves; None when it is not a vector instruction."""
    name, operands = instruction.mnemonic, [operand(text, descriptor) for text in instruction.operands]
    if name in TABLE or name in ("v_cndmask_b32",):
        return _simple(instruction, operands)
    if name in PACKED or name == "v_pk_mov_b32":
        return _packed(instruction, operands)
    if name.startswith("v_fma_mix"):
        return _mixed(instruction, operands)
    if instruction.modifiers and (name in COMPARE or name in _OTHERS):
        raise Unknown(f"modifiers {instruction.modifiers}")
    if name in COMPARE:
        return _compare(name, operands)
    return _OTHERS[name](operands) if name in _OTHERS else None


def _reads(operands: Sequence[Operand], kinds: Sequence[str]) -> list[Read]:
    return [reader(source, kind, per_lane=True) for source, kind in zip(operands, kinds, strict=True)]


def _write(waves: Waves, destination: Operand, words: Sequence[Array], also: Array | None = None) -> None:
    for place, word in enumerate(words):
        waves.write_vector(destination.register + place, word, also)


def _lanes_of(mask: Operand) -> Read:
    """A mask in scalar registers, or a constant one, as booleans per lane."""
    if mask.register < 0:
        bits = np.full(1, mask.number & 0xFFFFFFFFFFFFFFFF if isinstance(mask.number, int) else 0, np.uint64)
        return lambda waves: as_lanes(bits)
    return lambda waves: as_lanes(waves.mask(mask.register))


def _simple(instruction: Instruction, operands: list[Operand]) -> Step:
    """Everything in TABLE, in any encoding, and v_cndmask_b32."""
    if instruction.mnemonic == "v_cndmask_b32":
        *operands, mask = operands
        choice = _lanes_of(mask)
        result, kinds, function = "u32", ["u32", "u32"], None
    else:
        op = TABLE[instruction.mnemonic]
        result, function = op.result, op.function
        kinds = [op.result if kind == "dst" else kind for kind in op.sources]
    destination, *sources = operands if function is None or "dst" not in op.sources else [operands[0], *operands]
    modifiers, dpp = dict(instruction.modifiers), None
    if instruction.encoding == "sdwa":
        if any(modifiers.pop(name, default) != default for name, default in _SDWA_DEFAULTS.items()):
            raise Unknown(f"modifiers {instruction.modifiers}")
        reads = [
            part(source, modifiers.pop(f"src{place}_sel"), kind, reader(source, "u32", per_lane=True))
            for place, (source, kind) in enumerate(zip(sources, kinds, strict=True))
        ]
    else:
        reads = _reads(sources, kinds)
    if instruction.encoding == "dpp":
        dpp, modifiers = FromOtherLanes(modifiers), {}
        reads[0] = dpp.through(reads[0])
    if modifiers:
        raise Unknown(f"modifiers {modifiers}")

    def run(waves: Waves) -> None:
        values = [read(waves) for read in reads]
        value = np.where(choice(waves), values[1], values[0]) if function is None else function(*values)
        _write(waves, destination, split(value, result), dpp.written(waves) if dpp else None)

    return run


def _flags(instruction: Instruction, name: str, count: int, default: int) -> list[bool]:
    """op_sel:[1,0] and the like."""
    text = instruction.modifiers.get(name)
    return [bool(int(bit)) for bit in text.strip("[]").split(",")] if text else [bool(default)] * count


def _only(instruction: Instruction, *names: str) -> None:
    unknown = set(instruction.modifiers) - set(names)
    if unknown:
        raise Unknown(f"modifiers {unknown}")


def _packed(instruction: Instruction, operands: list[Operand]) -> Step:
    """v_pk_*: op_sel and neg_lo choose for the low result, op_sel_hi and neg_hi for the high one."""
    destination, *sources = operands
    count, move = len(sources), instruction.mnemonic == "v_pk_mov_b32"
    kind, function = ("u32", None) if move else PACKED[instruction.mnemonic]
    _only(instruction, "op_sel", *(() if move else ("op_sel_hi", "neg_lo", "neg_hi")))
    chosen = [_flags(instruction, "op_sel", count, 0), _flags(instruction, "op_sel_hi", count, 1)]
    negated = [_flags(instruction, name, count, 0) for name in ("neg_lo", "neg_hi")]

    def half(source: Operand, high: bool, negate: bool) -> Read:
        if source.register < 0 and high and source.number:
            raise Unknown(f"the high half of {source.text}")
        whole = _reads([source], ["u32" if kind == "f16" else "u64"])[0] if source.register >= 0 else _reads([source], [kind])[0]
        shift = (16 if kind == "f16" else 32) * high

        def read(waves: Waves) -> Array:
            bits = whole(waves)
            if source.register >= 0:
                words = bits >> bits.dtype.type(shift)
                bits = words.astype(np.uint16).view(np.float16) if kind == "f16" else words.astype(np.uint32).view(_dtype(kind))
            return np.negative(bits) if negate else bits

        return read

    if move:
        low, high = (half(source, select, False) for source, select in zip(sources, chosen[0], strict=True))
        return lambda waves: _write(waves, destination, [low(waves), high(waves)])
    reads = [[half(*of) for of in zip(sources, chosen[place], negated[place], strict=True)] for place in (0, 1)]
    assert function

    def run(waves: Waves) -> None:
        words = [split(function(*(read(waves) for read in of)), kind)[0] for of in reads]
        _write(waves, destination, [words[0] | words[1] << np.uint32(16)] if kind == "f16" else words)

    return run


def _dtype(kind: str) -> Any:
    return {"u32": np.uint32, "f32": np.float32}[kind]


def _mixed(instruction: Instruction, operands: list[Operand]) -> Step:
    """v_fma_mix_f32, v_fma_mixlo_f16, v_fma_mixhi_f16: op_sel_hi makes a source fp16, op_sel then takes its high half."""
    _only(instruction, "op_sel", "op_sel_hi")
    destination, *sources = operands
    high, halves = _flags(instruction, "op_sel", 3, 0), _flags(instruction, "op_sel_hi", 3, 0)
    reads: list[Read] = []
    for source, upper, half in zip(sources, high, halves, strict=True):
        if half and source.register >= 0:
            if source.absolute:
                raise Unknown(f"operand {source.text}")
            plain = Operand(source.text, source.vector, source.register, source.count)
            read = part(plain, f"WORD_{upper:d}", "f16", reader(plain, "u32", per_lane=True))
            sign = np.float32(-1 if source.negate else 1)
            reads.append(partial(_widened, read, sign))
        else:
            reads.append(reader(source, "f16" if half else "f32", per_lane=True))
    target = instruction.mnemonic.removeprefix("v_fma_mix")

    def run(waves: Waves) -> None:
        value = fma(*(read(waves).astype(np.float32) for read in reads))
        if target == "_f32":
            _write(waves, destination, split(value, "f32"))
            return
        word, old = split(value, "f16")[0], waves.vector[destination.register, waves.chosen]
        kept = old & np.uint32(0xFFFF0000) | word if target == "lo_f16" else old & np.uint32(0xFFFF) | word << np.uint32(16)
        _write(waves, destination, [kept])

    if target not in ("_f32", "lo_f16", "hi_f16"):
        raise Unknown("instruction")
    return run


def _widened(read: Read, sign: np.float32, waves: Waves) -> Array:
    return read(waves).astype(np.float32) * sign


def _compare(name: str, operands: list[Operand]) -> Step:
    """One bit per lane; those of inactive lanes are 0."""
    kind, function = COMPARE[name]
    destination, *sources = operands
    reads = _reads(sources, [kind, kind])
    return lambda waves: waves.write_mask(destination.register, waves.lanes & function(*(read(waves) for read in reads)))


def _with_carry(sign: int, carried: bool) -> Callable[[list[Operand]], Step]:
    """32-bit sums and differences whose carry is a mask."""

    def make(operands: list[Operand]) -> Step:
        destination, carry, *sources = operands
        reads = _reads(sources[:2], ["u32", "u32"])
        taken = _lanes_of(sources[2]) if carried else None

        def run(waves: Waves) -> None:
            a, b = (read(waves).astype(np.int64) for read in reads)
            total = a + sign * (b + (taken(waves) if taken else 0))
            _write(waves, destination, split(total, "u32"))
            waves.write_mask(carry.register, waves.lanes & ((total < 0) | (total > 0xFFFFFFFF)))

        return run

    return make


def _multiply_add(kind: str) -> Callable[[list[Operand]], Step]:
    """v_mad_u64_u32, v_mad_i64_i32: a sum of 65 bits, of which the mask gets the highest."""
    wide = {"u32": "u64", "i32": "i64"}[kind]

    def make(operands: list[Operand]) -> Step:
        destination, carry, *sources = operands
        a, b, c = _reads(sources, [kind, kind, wide])
        dtype = np.dtype({"u64": np.uint64, "i64": np.int64}[wide])

        def run(waves: Waves) -> None:
            product, addend = a(waves).astype(dtype) * b(waves).astype(dtype), c(waves)
            total = product + addend
            signed = np.where((product < 0) == (addend < 0), product < 0, total < 0)
            highest = total < addend if wide == "u64" else signed
            _write(waves, destination, split(total, wide))
            waves.write_mask(carry.register, waves.lanes & highest)

        return run

    return make


def _scale(operands: list[Operand]) -> Step:
    destination, flag, *sources = operands
    reads = _reads(sources, ["f32"] * 3)

    def run(waves: Waves) -> None:
        value, back = div_scale(*(read(waves) for read in reads))
        _write(waves, destination, split(value, "f32"))
        waves.write_mask(flag.register, waves.lanes & back)

    return run


def _refine(operands: list[Operand]) -> Step:
    destination, *sources = operands
    reads = _reads(sources, ["f32"] * 3)

    def run(waves: Waves) -> None:
        a, b, c = (read(waves) for read in reads)
        value = div_fmas(a, b, c, as_lanes(waves.mask(VCC)))
        _write(waves, destination, split(value, "f32"))

    return run


def _read_lane(operands: list[Operand]) -> Step:
    """v_readlane_b32, and v_readfirstlane_b32 without a lane's number: the first that is active."""
    destination, source, *lane = operands
    if lane and lane[0].register >= 0:
        raise Unknown(f"lane {lane[0].text}")
    number = int(lane[0].number) if lane else None

    def run(waves: Waves) -> None:
        values = waves.vector[source.register, waves.chosen]
        lanes = np.argmax(waves.lanes, axis=1) if number is None else np.full(len(values), number)
        waves.write_scalar(destination.register, values[np.arange(len(values)), lanes])

    return run


_OTHERS: Final[dict[str, Callable[[list[Operand]], Step]]] = {
    "v_add_co_u32": _with_carry(1, False),
    "v_addc_co_u32": _with_carry(1, True),
    "v_sub_co_u32": _with_carry(-1, False),
    "v_subb_co_u32": _with_carry(-1, True),
    "v_mad_u64_u32": _multiply_add("u32"),
    "v_mad_i64_i32": _multiply_add("i32"),
    "v_div_scale_f32": _scale,
    "v_div_fmas_f32": _refine,
    "v_readlane_b32": _read_lane,
    "v_readfirstlane_b32": _read_lane,
}
