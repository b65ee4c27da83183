"""Emulates scalar instructions, which compute one value per wave. A table has their functions by mnemonic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .disassembly import Descriptor, Instruction
from .operands import Unknown, operand, reader, split, writable
from .state import EXEC, Array, Waves

Step = Callable[[Waves], None]


@dataclass(frozen=True)
class Scalar:
    """The function of a scalar instruction, and the source of the condition flag SCC.

    `flag` is "result" (SCC = the result is not 0), "given" (the function returns SCC too) or "" (SCC is unchanged).
    """

    result: str  # kind of the result; "" if only SCC is written
    sources: tuple[str, ...]
    function: Callable[..., Any]
    flag: str = ""
    takes_flag: bool = False


def _op(kinds: str, function: Callable[..., Any], flag: str = "", takes_flag: bool = False) -> Scalar:
    result, _, sources = kinds.partition("=")
    return Scalar(result.strip(), tuple(sources.split()), function, flag, takes_flag)


def _wide(x: Array) -> Array:
    return x.astype(np.int64)


def _carried(total: Array) -> tuple[Array, Array]:
    """Return an unsigned sum or difference, given as int64, and its carry or borrow."""
    return total & 0xFFFFFFFF, (total < 0) | (total > 0xFFFFFFFF)


def _signed(total: Array) -> tuple[Array, Array]:
    """Return a signed sum or difference, given as int64, and its overflow."""
    return total, (total < -(2**31)) | (total >= 2**31)


def _field(bits: Array, place: Array) -> Array:
    """Extract a bit field. `place` has the number of its first bit in bits 0-4 and its width in bits 16-22."""
    width = (place >> 16) & 0x7F
    return (bits.astype(np.uint64) >> (place & 31)) & ((np.uint64(1) << width) - np.uint64(1))


def _signed_field(bits: Array, place: Array) -> Array:
    """Extract a bit field as `_field` does, sign-extended."""
    width = np.minimum((place >> 16) & 0x7F, 32).astype(np.uint64)
    sign = (np.uint64(1) << width) >> np.uint64(1)
    return ((_field(bits, place) ^ sign) - sign).astype(np.uint32)


def reverse_bits(x: Array) -> Array:
    """Reverse the order of the 32 bits."""
    return np.packbits(
        np.unpackbits(np.ascontiguousarray(x)[..., None].view(np.uint8), axis=-1), axis=-1, bitorder="little"
    ).view(">u4")[..., 0]


_U = "u32 = u32 u32"
_I = "i32 = i32 i32"
_D = "u64 = u64 u64"
TABLE: Final[dict[str, Scalar]] = {
    "s_mov_b32": _op("u32 = u32", lambda a: a),
    "s_mov_b64": _op("u64 = u64", lambda a: a),
    "s_movk_i32": _op("i32 = k16", lambda a: a),
    "s_not_b32": _op("u32 = u32", np.invert, "result"),
    "s_brev_b32": _op("u32 = u32", reverse_bits),
    "s_abs_i32": _op("i32 = i32", np.abs, "result"),
    "s_add_u32": _op(_U, lambda a, b: _carried(_wide(a) + _wide(b)), "given"),
    "s_sub_u32": _op(_U, lambda a, b: _carried(_wide(a) - _wide(b)), "given"),
    "s_addc_u32": _op(_U, lambda a, b, c: _carried(_wide(a) + _wide(b) + c), "given", True),
    "s_subb_u32": _op(_U, lambda a, b, c: _carried(_wide(a) - _wide(b) - c), "given", True),
    "s_add_i32": _op(_I, lambda a, b: _signed(_wide(a) + _wide(b)), "given"),
    "s_sub_i32": _op(_I, lambda a, b: _signed(_wide(a) - _wide(b)), "given"),
    "s_addk_i32": _op("i32 = dst k16", lambda a, b: _signed(_wide(a) + _wide(b)), "given"),
    "s_mul_i32": _op(_I, np.multiply),
    "s_mul_hi_i32": _op(_I, lambda a, b: (_wide(a) * _wide(b)) >> 32),
    "s_mul_hi_u32": _op(_U, lambda a, b: (a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)),
    "s_min_i32": _op(_I, lambda a, b: (np.minimum(a, b), a < b), "given"),
    "s_max_i32": _op(_I, lambda a, b: (np.maximum(a, b), a > b), "given"),
    "s_and_b32": _op(_U, np.bitwise_and, "result"),
    "s_or_b32": _op(_U, np.bitwise_or, "result"),
    "s_xor_b32": _op(_U, np.bitwise_xor, "result"),
    "s_and_b64": _op(_D, np.bitwise_and, "result"),
    "s_or_b64": _op(_D, np.bitwise_or, "result"),
    "s_xor_b64": _op(_D, np.bitwise_xor, "result"),
    "s_andn2_b32": _op(_U, lambda a, b: a & ~b, "result"),
    "s_nor_b64": _op(_D, lambda a, b: ~(a | b), "result"),
    "s_andn2_b64": _op(_D, lambda a, b: a & ~b, "result"),
    "s_lshl_b32": _op(_U, lambda a, b: a << (b & 31), "result"),
    "s_lshr_b32": _op(_U, lambda a, b: a >> (b & 31), "result"),
    "s_ashr_i32": _op("i32 = i32 i32", lambda a, b: a >> (b & 31), "result"),
    "s_lshl_b64": _op("u64 = u64 u32", lambda a, b: a << (b & 63).astype(np.uint64), "result"),
    "s_lshr_b64": _op("u64 = u64 u32", lambda a, b: a >> (b & 63).astype(np.uint64), "result"),
    "s_lshl2_add_u32": _op(_U, lambda a, b: _carried((_wide(a) << 2) + _wide(b)), "given"),
    "s_lshl3_add_u32": _op(_U, lambda a, b: _carried((_wide(a) << 3) + _wide(b)), "given"),
    "s_lshl4_add_u32": _op(_U, lambda a, b: _carried((_wide(a) << 4) + _wide(b)), "given"),
    "s_bfe_u32": _op(_U, _field, "result"),
    "s_bfe_i32": _op(_U, _signed_field, "result"),
    "s_cselect_b32": _op(_U, lambda a, b, c: np.where(c, a, b), takes_flag=True),
    "s_cselect_b64": _op(_D, lambda a, b, c: np.where(c, a, b), takes_flag=True),
    "s_bitcmp0_b32": _op("= u32 u32", lambda a, b: (None, a >> (b & 31) & 1 == 0), "given"),
    "s_bitcmp1_b32": _op("= u32 u32", lambda a, b: (None, a >> (b & 31) & 1 == 1), "given"),
}
_ORDER: Final = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}
for _name, _compare in _ORDER.items():
    for _kind in ("i32", "u32", "u64"):
        TABLE[f"s_cmp_{_name}_{_kind}"] = _op(
            f"= {_kind} {_kind}", lambda a, b, compare=_compare: (None, compare(a, b)), "given"
        )
    TABLE[f"s_cmpk_{_name}_i32"] = _op("= i32 k16", lambda a, b, compare=_compare: (None, compare(a, b)), "given")
_SAVING: Final[dict[str, Callable[[Array, Array], Array]]] = {
    "s_and_saveexec_b64": lambda source, mask: source & mask,
    "s_or_saveexec_b64": lambda source, mask: source | mask,
    "s_andn2_saveexec_b64": lambda source, mask: source & ~mask,
}


def step(instruction: Instruction, descriptor: Descriptor) -> Step | None:
    """Return the function that executes the instruction on the chosen waves, or None if it is no scalar instruction."""
    name = instruction.mnemonic
    if name not in TABLE and name not in _SAVING:
        return None
    if instruction.modifiers:
        raise Unknown(f"modifiers {instruction.modifiers}")
    if name in _SAVING:
        return _saving(_SAVING[name], instruction, descriptor)
    op = TABLE[name]
    texts = list(instruction.operands)
    destination = operand(texts[0], descriptor) if op.result else None
    if destination:
        writable(destination, op.result)
        texts = texts if "dst" in op.sources else texts[1:]
    reads = [
        _short(text)
        if kind == "k16"
        else reader(operand(text, descriptor), op.result if kind == "dst" else kind, per_lane=False)
        for text, kind in zip(texts, op.sources, strict=True)
    ]

    def run(waves: Waves) -> None:
        values = [read(waves) for read in reads]
        if op.takes_flag:
            values.append(waves.scc[waves.chosen])
        result = op.function(*values)
        flag = None
        if op.flag == "given":
            result, flag = result
        if destination:
            words = split(result, op.result)
            for place, word in enumerate(words):
                waves.write_scalar(destination.register + place, word)
            if op.flag == "result":
                flag = np.not_equal(words[0] | words[-1], 0)
        if flag is not None:
            waves.scc[waves.chosen] = flag

    return run


def _short(text: str) -> Callable[[Waves], Array]:
    """Return a reader of a signed 16-bit constant. llvm-objdump prints the constant as an unsigned number."""
    value = np.array([((int(text, 0) & 0xFFFF) ^ 0x8000) - 0x8000], np.int32)
    return lambda waves: value


def _saving(combine: Callable[[Array, Array], Array], instruction: Instruction, descriptor: Descriptor) -> Step:
    saved, source = (operand(text, descriptor) for text in instruction.operands)
    read = reader(source, "u64", per_lane=False)

    def run(waves: Waves) -> None:
        old = waves.mask(EXEC)
        new = combine(read(waves), old)
        for place, word in enumerate(split(old, "u64")):
            waves.write_scalar(saved.register + place, word)
        for place, word in enumerate(split(new, "u64")):
            waves.write_scalar(EXEC + place, word)
        waves.scc[waves.chosen] = new != 0

    return run
