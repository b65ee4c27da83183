"""Executes a kernel over a grid. Waves at the same instruction step together, and the lowest address goes first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np

from . import matrix, scalar, vector
from .access import Access, Places, access
from .disassembly import Descriptor, Instruction, Program
from .fault import Fault, Violation
from .global_memory import Memory
from .in_flight import InFlight
from .local_memory import LocalMemory
from .operands import Unknown, operand
from .state import LANES, VCC, Array, Waves

# Number of waves whose registers numpy processes at once. This number hides numpy's overhead per call and fits into the
# caches.
WAVES_AT_ONCE: Final = 64
STEPS_AT_MOST: Final = 20_000_000  # limit for one `_Lot` of workgroups, which ends endless loops
_CONDITIONS: Final[dict[str, Callable[[Waves], Any]]] = {
    "s_branch": lambda waves: np.ones(len(waves.waves), bool),
    "s_cbranch_scc0": lambda waves: ~waves.scc[waves.chosen],
    "s_cbranch_scc1": lambda waves: waves.scc[waves.chosen],
    "s_cbranch_vccz": lambda waves: waves.mask(VCC) == 0,
    "s_cbranch_vccnz": lambda waves: waves.mask(VCC) != 0,
    "s_cbranch_execz": lambda waves: ~waves.lanes.any(axis=1),
    "s_cbranch_execnz": lambda waves: waves.lanes.any(axis=1),
}
Trace = list[
    tuple[int, int]
]  # for each instruction that one wave executed: its index, and the cycles for which it occupied the LDS
_CLASSES: Final = (
    ("v_mfma", "mfma"),
    ("v_", "valu"),
    ("s_waitcnt", "waits"),
    ("s_barrier", "barriers"),
    ("s_load", "smem"),
    ("s_", "salu"),
    ("ds_", "lds"),
    ("global_", "vmem"),
    ("buffer_", "vmem"),
)


@dataclass
class Counts:
    """The number of executed instructions by class, summed over all waves, and the bytes that active lanes moved."""

    waves: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    bytes_moved: dict[str, int] = field(default_factory=dict)

    @property
    def per_wave(self) -> dict[str, float]:
        """The average number of instructions of each class that a wave executes."""
        return {name: count / self.waves for name, count in self.instructions.items()}


def class_of(mnemonic: str) -> str:
    """Return the class of an instruction: valu, salu, mfma, vmem, smem, lds, waits or barriers."""
    return next(name for prefix, name in _CLASSES if mnemonic.startswith(prefix))


@dataclass(frozen=True)
class _Compiled:
    """An instruction with the function that executes it. `control` is set for branches, barriers and the end."""

    instruction: Instruction
    touched: frozenset[tuple[bool, int]]
    step: scalar.Step | None = None
    access: Access | None = None
    control: bool = False


def run(
    program: Program, grid: tuple[int, int, int], threads: int, shared_bytes: int, kernarg: bytes, memory: Memory, *,
    trace: Trace | None = None, workgroups: int | None = None,
) -> Counts:  # fmt: skip
    """Execute a kernel. `kernarg` is the buffer of its arguments. Raises Fault.

    The instructions of the first wave are appended to `trace`. With `workgroups` only this number of workgroups is
    executed, from the beginning of the grid.
    """
    compiled = _compiled(program)
    arguments = np.frombuffer(bytearray(kernarg), np.uint8)
    address = memory.add("the arguments", arguments)
    counts = Counts()
    waves_per_group = threads // LANES
    groups = workgroups or math.prod(grid)
    lot = max(1, WAVES_AT_ONCE // waves_per_group)
    for first in range(0, groups, lot):
        ids = np.unravel_index(np.arange(first, min(first + lot, groups)), grid[::-1])[::-1]
        waves = _start(program.descriptor, ids, waves_per_group, shared_bytes, address)
        lot_of_groups = _Lot(
            program=program,
            compiled=compiled,
            waves=waves,
            memory=memory,
            counts=counts,
            trace=trace if first == 0 else None,
            first=first,
        )
        lot_of_groups.execute()
    return counts


@lru_cache(maxsize=256)
def _compiled(program: Program) -> list[_Compiled]:
    return [_compile(instruction, program.descriptor) for instruction in program.instructions]


def _compile(instruction: Instruction, descriptor: Descriptor) -> _Compiled:
    name = instruction.mnemonic
    if name == "s_waitcnt" and not instruction.modifiers.keys() <= {"vmcnt", "lgkmcnt", "expcnt"}:
        raise Fault("unknown to the simulator: counters", where=instruction.text)
    if name in _CONDITIONS or name in ("s_barrier", "s_endpgm", "s_waitcnt", "s_nop"):
        return _Compiled(instruction, frozenset(), control=name not in ("s_nop", "s_waitcnt"))
    try:
        touched = frozenset().union(*(_touched(text, descriptor) for text in instruction.operands))
        if memory_access := access(instruction, descriptor):
            return _Compiled(instruction, touched, access=memory_access)
        for kind in (scalar, matrix, vector):
            if step := kind.step(instruction, descriptor):
                return _Compiled(instruction, touched, step)
        raise Unknown("instruction")
    except (Unknown, ValueError, KeyError) as error:
        raise Fault(f"unknown to the simulator: {error}", where=instruction.text) from error


def _touched(text: str, descriptor: Descriptor) -> frozenset[tuple[bool, int]]:
    return operand(text, descriptor).rows if text != "off" and not text.startswith("0x") else frozenset()


def _start(
    descriptor: Descriptor, ids: tuple[Any, ...], waves_per_group: int, shared_bytes: int, kernarg: int
) -> Waves:
    """Return the registers as the command processor initialises them. Arguments are not preloaded: the kernel's first
    instructions load them.
    """
    waves = Waves(descriptor.vector_registers, len(ids[0]), waves_per_group, shared_bytes)
    waves.scalar[descriptor.kernarg_register] = kernarg & 0xFFFFFFFF
    waves.scalar[descriptor.kernarg_register + 1] = kernarg >> 32
    for register, of_axis in zip(descriptor.group_id_registers, ids, strict=False):
        waves.scalar[register] = np.repeat(of_axis, waves_per_group)
    thread = np.arange(waves_per_group * LANES, dtype=np.uint32).reshape(1, waves_per_group, LANES)
    waves.vector[0] = np.broadcast_to(thread, (len(ids[0]), waves_per_group, LANES)).reshape(-1, LANES)
    return waves


class _Lot:
    """The workgroups that are simulated together (64 waves in total, or one workgroup if it is larger)."""

    def __init__(
        self,
        program: Program,
        compiled: list[_Compiled],
        waves: Waves,
        memory: Memory,
        counts: Counts,
        trace: Trace | None,
        first: int,
    ) -> None:
        self.program = program
        self.compiled = compiled
        self.waves = waves
        self.counts = counts
        self.trace = trace
        self.first = first
        groups = waves.count // waves.waves_per_group
        self.places = Places(memory, LocalMemory(groups, waves.waves_per_group, waves.shared_bytes))
        self.in_flight = InFlight(waves.count)
        self.at: Array = np.zeros(waves.count, np.int64)
        self.waiting: Array = np.zeros(waves.count, bool)
        self.ended: Array = np.zeros(waves.count, bool)
        self.steps = 0

    def execute(self) -> None:
        """Execute instructions until every wave has ended."""
        executed = [0] * len(self.compiled)
        with np.errstate(all="ignore"):
            while not self.ended.all():
                self._step_together(executed)
        self.counts.waves += self.waves.count
        for compiled, times in zip(self.compiled, executed, strict=True):
            if times:
                name = class_of(compiled.instruction.mnemonic)
                self.counts.instructions[name] = self.counts.instructions.get(name, 0) + times

    def _step_together(self, executed: list[int]) -> None:
        """Choose the waves at the lowest address. Run them until they reach other waves, diverge, wait or end."""
        able = ~(self.waiting | self.ended)
        if not able.any():
            self._fail(
                Violation("a barrier that not all waves of the workgroup reach", int(np.argmax(self.waiting))),
                np.arange(self.waves.count),
            )
        at = int(self.at[able].min())
        chosen = np.flatnonzero(able & (self.at == at))
        others = self.at[able & (self.at > at)]
        limit = int(others.min()) if len(others) else len(self.compiled)
        self.waves.choose(chosen)
        traced = self.trace if self.trace is not None and chosen[0] == 0 else None
        self.places.local.watched = traced is not None
        while at < limit:
            compiled = self.compiled[at]
            executed[at] += len(chosen)
            self.steps += 1
            before = self.places.local.cycles
            try:
                if self.steps > STEPS_AT_MOST:
                    raise Violation(f"no end after {STEPS_AT_MOST} steps")
                following = (
                    self._control(compiled.instruction, at) if compiled.control else self._straight(compiled, at)
                )
            except Violation as violation:
                self._fail(violation, chosen, compiled.instruction)
            if traced is not None:
                traced.append((at, self.places.local.cycles - before))
            if following is None:
                return
            at = following
        self.at[chosen] = at

    def _straight(self, compiled: _Compiled, at: int) -> int:
        if self.in_flight.registers and not compiled.touched.isdisjoint(self.in_flight.registers):
            self.in_flight.check(self.waves, compiled.touched, compiled.access)
        if compiled.step:
            compiled.step(self.waves)
        elif compiled.access:
            compiled.access.step(self.waves, self.places)
            self.in_flight.issue(self.waves, compiled.access)
            self._count_bytes(compiled)
        elif compiled.instruction.mnemonic == "s_waitcnt":
            self.in_flight.wait(self.waves, compiled.instruction)
        return at + 1

    def _control(self, instruction: Instruction, at: int) -> int | None:
        """Return the index at which all chosen waves continue. Returns None if they diverge, wait or end; then
        `self.at` has the position of each wave.
        """
        chosen = self.waves.waves
        if instruction.mnemonic == "s_endpgm":
            self.ended[chosen] = True
            return None
        if instruction.mnemonic == "s_barrier":
            self.in_flight.check_barrier(self.waves)
            self._wait_for_group(chosen, at + 1)
            return None
        taken = _CONDITIONS[instruction.mnemonic](self.waves)
        if taken.all():
            return instruction.target
        if not taken.any():
            return at + 1
        self.at[chosen] = np.where(taken, instruction.target, at + 1)
        return None

    def _wait_for_group(self, chosen: Array, following: int) -> None:
        self.at[chosen] = following
        self.waiting[chosen] = True
        by_group = self.waiting.reshape(-1, self.waves.waves_per_group)
        there = by_group.all(axis=1)
        positions = self.at.reshape(by_group.shape)[there]
        if (positions != positions[:, :1]).any():
            raise Violation("waves of one workgroup wait at different barriers")
        by_group[there] = False
        self.places.local.epoch[there] += 1

    def _count_bytes(self, compiled: _Compiled) -> None:
        assert compiled.access
        name = compiled.instruction.mnemonic
        lanes = int(self.waves.lanes.sum())
        kind = class_of(name)
        kind += {
            "vmem": " stored" if "store" in name else " loaded",
            "lds": " written" if "write" in name else " read",
        }.get(kind, "")
        size = compiled.access.size * (len(self.waves.waves) if compiled.access.scalar else lanes)
        self.counts.bytes_moved[kind] = self.counts.bytes_moved.get(kind, 0) + size

    def _fail(self, violation: Violation, chosen: Array, instruction: Instruction | None = None) -> None:
        wave = int(chosen[violation.wave])
        group, inside = divmod(wave, self.waves.waves_per_group)
        where = f"{self.program.symbol}, workgroup {self.first + group}, wave {inside}"
        where += "" if violation.lane is None else f", lane {violation.lane}"
        where += f", at {instruction.address:#x}: {instruction.text}" if instruction else ""
        raise Fault(violation.what, where=where) from violation
