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
    """Extract a bit field. `place` has the number of its first bit in its lowest bits and its width in bits 16-22."""
    first = place & (8 * bits.itemsize - 1)
    width = (place >> 16) & 0x7F
    shifted = bits.astype(np.uint64) >> first.astype(np.uint64)
    return np.where(width < 64, shifted & ((np.uint64(1) << width.astype(np.uint64)) - np.uint64(1)), shifted)


def _signed_field(bits: Array, place: Array) -> Array:
    """Extract a bit field as `_field` does, sign-extended."""
    width = np.minimum((place >> 16) & 0x7F, 8 * bits.itemsize).astype(np.uint64)
    sign = (np.uint64(1) << width) >> np.uint64(1)
    return ((_field(bits, place) ^ sign) - sign).astype(bits.dtype)


def _bits(x: Array) -> Array:
    """Return the bits of unsigned numbers, lowest bit first, along a new last dim."""
    return np.unpackbits(np.ascontiguousarray(x)[..., None].view(np.uint8), axis=-1, bitorder="little")


def reverse_bits(x: Array) -> Array:
    """Reverse the order of the bits of unsigned numbers."""
    return np.packbits(_bits(x)[..., ::-1], axis=-1, bitorder="little").view(x.dtype)[..., 0]


def _count(x: Array) -> Array:
    """Return the number of bits that are 1."""
    return _bits(x).sum(axis=-1, dtype=np.int32)


def _lowest(x: Array) -> Array:
    """Return the position of the lowest 1 bit, or -1 if no bit is 1."""
    bits = _bits(x)
    return np.where(bits.any(axis=-1), bits.argmax(axis=-1), -1)


def _leading_zeros(x: Array) -> Array:
    """Return the number of 0 bits above the highest 1 bit, or -1 if no bit is 1."""
    return _lowest(reverse_bits(x))


def _leading_signs(x: Array) -> Array:
    """Return the number of highest bits that equal the sign bit of a signed number, or -1 if all bits equal it."""
    without_sign = np.where(x < 0, ~x, x)
    return _leading_zeros(without_sign.view(np.uint32 if x.dtype == np.int32 else np.uint64))


def _one_bit(x: Array, place: Array) -> Array:
    """Return 1 at bit `place` (modulo the width) of a number of the type of `x`."""
    width = 8 * x.dtype.itemsize
    return x.dtype.type(1) << (place & (width - 1)).astype(x.dtype)


def _ones(kind: type[np.unsignedinteger[Any]]) -> Callable[[Array, Array], Array]:
    """Return a function that makes a mask: `count` 1 bits that start at bit `place`."""

    def mask(count: Array, place: Array) -> Array:
        one = np.ones(1, kind)
        return (_one_bit(one, count) - one) * _one_bit(one, place)

    return mask


_U = "u32 = u32 u32"
_I = "i32 = i32 i32"
_D = "u64 = u64 u64"
TABLE: Final[dict[str, Scalar]] = {
    "s_mov_b32": _op("u32 = u32", lambda a: a),
    "s_mov_b64": _op("u64 = u64", lambda a: a),
    "s_movk_i32": _op("i32 = k16", lambda a: a),
    "s_cmov_b32": _op("u32 = dst u32", lambda old, a, c: np.where(c, a, old), takes_flag=True),
    "s_cmov_b64": _op("u64 = dst u64", lambda old, a, c: np.where(c, a, old), takes_flag=True),
    "s_cmovk_i32": _op("i32 = dst k16", lambda old, a, c: np.where(c, a, old), takes_flag=True),
    "s_sext_i32_i8": _op("i32 = u32", lambda a: a.astype(np.int8)),
    "s_sext_i32_i16": _op("i32 = u32", lambda a: a.astype(np.int16)),
    "s_abs_i32": _op("i32 = i32", np.abs, "result"),
    "s_add_u32": _op(_U, lambda a, b: _carried(_wide(a) + _wide(b)), "given"),
    "s_sub_u32": _op(_U, lambda a, b: _carried(_wide(a) - _wide(b)), "given"),
    "s_addc_u32": _op(_U, lambda a, b, c: _carried(_wide(a) + _wide(b) + c), "given", True),
    "s_subb_u32": _op(_U, lambda a, b, c: _carried(_wide(a) - _wide(b) - c), "given", True),
    "s_add_i32": _op(_I, lambda a, b: _signed(_wide(a) + _wide(b)), "given"),
    "s_sub_i32": _op(_I, lambda a, b: _signed(_wide(a) - _wide(b)), "given"),
    "s_addk_i32": _op("i32 = dst k16", lambda a, b: _signed(_wide(a) + _wide(b)), "given"),
    "s_absdiff_i32": _op(_I, lambda a, b: np.abs(_wide(a) - _wide(b)), "result"),
    "s_mul_i32": _op(_I, np.multiply),
    "s_mulk_i32": _op("i32 = dst k16", np.multiply),
    "s_mul_hi_i32": _op(_I, lambda a, b: (_wide(a) * _wide(b)) >> 32),
    "s_mul_hi_u32": _op(_U, lambda a, b: (a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)),
    "s_min_i32": _op(_I, lambda a, b: (np.minimum(a, b), a < b), "given"),
    "s_max_i32": _op(_I, lambda a, b: (np.maximum(a, b), a > b), "given"),
    "s_min_u32": _op(_U, lambda a, b: (np.minimum(a, b), a < b), "given"),
    "s_max_u32": _op(_U, lambda a, b: (np.maximum(a, b), a > b), "given"),
    "s_lshl_b32": _op(_U, lambda a, b: a << (b & 31), "result"),
    "s_lshr_b32": _op(_U, lambda a, b: a >> (b & 31), "result"),
    "s_ashr_i32": _op("i32 = i32 i32", lambda a, b: a >> (b & 31), "result"),
    "s_ashr_i64": _op("i64 = i64 u32", lambda a, b: a >> (b & 63).astype(np.int64), "result"),
    "s_lshl_b64": _op("u64 = u64 u32", lambda a, b: a << (b & 63).astype(np.uint64), "result"),
    "s_lshr_b64": _op("u64 = u64 u32", lambda a, b: a >> (b & 63).astype(np.uint64), "result"),
    "s_bfm_b32": _op(_U, _ones(np.uint32)),
    "s_bfm_b64": _op("u64 = u32 u32", _ones(np.uint64)),
    "s_bfe_u32": _op(_U, _field, "result"),
    "s_bfe_i32": _op(_U, _signed_field, "result"),
    "s_bfe_u64": _op("u64 = u64 u32", _field, "result"),
    "s_bfe_i64": _op("u64 = u64 u32", _signed_field, "result"),
    "s_pack_ll_b32_b16": _op(_U, lambda a, b: a & 0xFFFF | b << 16),
    "s_pack_lh_b32_b16": _op(_U, lambda a, b: a & 0xFFFF | b & 0xFFFF0000),
    "s_pack_hh_b32_b16": _op(_U, lambda a, b: a >> 16 | b & 0xFFFF0000),
    "s_flbit_i32": _op("i32 = i32", _leading_signs),
    "s_flbit_i32_i64": _op("i32 = i64", _leading_signs),
    "s_cselect_b32": _op(_U, lambda a, b, c: np.where(c, a, b), takes_flag=True),
    "s_cselect_b64": _op(_D, lambda a, b, c: np.where(c, a, b), takes_flag=True),
}
for _width in ("32", "64"):
    _kind = f"u{_width}"
    _of_width = {
        f"s_not_b{_width}": _op(f"{_kind} = {_kind}", np.invert, "result"),
        f"s_brev_b{_width}": _op(f"{_kind} = {_kind}", reverse_bits),
        f"s_bcnt0_i32_b{_width}": _op(f"i32 = {_kind}", lambda a: _count(~a), "result"),
        f"s_bcnt1_i32_b{_width}": _op(f"i32 = {_kind}", _count, "result"),
        f"s_ff0_i32_b{_width}": _op(f"i32 = {_kind}", lambda a: _lowest(~a)),
        f"s_ff1_i32_b{_width}": _op(f"i32 = {_kind}", _lowest),
        f"s_flbit_i32_b{_width}": _op(f"i32 = {_kind}", _leading_zeros),
        f"s_bitset0_b{_width}": _op(f"{_kind} = dst u32", lambda old, a: old & ~_one_bit(old, a)),
        f"s_bitset1_b{_width}": _op(f"{_kind} = dst u32", lambda old, a: old | _one_bit(old, a)),
        f"s_bitcmp0_b{_width}": _op(f"= {_kind} u32", lambda a, b: (None, a & _one_bit(a, b) == 0), "given"),
        f"s_bitcmp1_b{_width}": _op(f"= {_kind} u32", lambda a, b: (None, a & _one_bit(a, b) != 0), "given"),
    }
    TABLE.update(_of_width)
for _shift in (1, 2, 3, 4):
    TABLE[f"s_lshl{_shift}_add_u32"] = _op(
        _U, lambda a, b, shift=_shift: _carried((_wide(a) << shift) + _wide(b)), "given"
    )
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
    for _kind, _constant in (("i32", "k16"), ("u32", "k16u")):
        TABLE[f"s_cmpk_{_name}_{_kind}"] = _op(
            f"= {_kind} {_constant}", lambda a, b, compare=_compare: (None, compare(a, b)), "given"
        )
# Bitwise operations. Each one exists for 32 and 64 bits, and as "saveexec", whose second operand is the EXEC mask.
_BITWISE: Final[dict[str, Callable[[Array, Array], Array]]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
_SAVING: Final[dict[str, Callable[[Array, Array], Array]]] = {
    "s_andn1_saveexec_b64": lambda source, mask: ~source & mask,
    "s_orn1_saveexec_b64": lambda source, mask: ~source | mask,
}
for _name, _combine in _BITWISE.items():
    TABLE[f"s_{_name}_b32"] = _op(_U, _combine, "result")
    TABLE[f"s_{_name}_b64"] = _op(_D, _combine, "result")
    _SAVING[f"s_{_name}_saveexec_b64"] = _combine


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
        _short(text, signed=kind == "k16")
        if kind in ("k16", "k16u")
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


def _short(text: str, signed: bool) -> Callable[[Waves], Array]:
    """Return a reader of a 16-bit constant. llvm-objdump prints the constant as an unsigned number."""
    bits = int(text, 0) & 0xFFFF
    value = np.array([(bits ^ 0x8000) - 0x8000], np.int32) if signed else np.array([bits], np.uint32)
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
