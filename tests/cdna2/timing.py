"""How long a compute unit takes for a kernel: the instructions that one wave executed, issued again under the machine's
rates.

A model, not a measurement. One SIMD is simulated with as many waves as it holds, each a copy of the traced one and
followed by another, and a quarter of what the four SIMDs of a compute unit share. A wave issues in order; waves overlap
where they want different units, and the oldest one goes first. Waits for results of vector and matrix instructions are
in the code (gfx90a's compiler puts s_nop there), those for memory at s_waitcnt. An access to the LDS takes the cycles
that its addresses and banks ask for; a line of instructions that the instruction cache has lost is a load. Not
modelled: waves of a workgroup that arrive at a barrier at different times.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from .access import access
from .disassembly import Instruction, Program
from .simulator import Trace
from .state import LANES

SIMDS: Final = 4  # of a compute unit
# waves that follow each other in a wave's place: those of a SIMD begin together, and drift apart as others' do
_SUCCESSORS: Final = 4
_QUARTER_RATE = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_f|v_mul_(lo|hi)_|v_mad_[ui]64_")
_MATRIX = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True)
class Rates:
    """Of a compute unit of the MI250X, in cycles of its clock.

    Matrix rate: 191.5 TFLOP/s per GCD of 110 compute units at 1.7 GHz (AMD, CDNA 2 white paper) are 1024 FLOP per
    cycle. LDS: 128 bytes per cycle, vector L1: 64. Instruction cache: 32 KiB in lines of 64 bytes for two compute units
    (Linux, amdkfd's tables for Aldebaran), which run the same kernel here. The latencies are assumptions: an LDS access
    of some 64 cycles, a load that hits L2 some 500 under load.
    """

    matrix_flops: int = 1024
    lds_bytes: int = 128
    bank_conflicts: bool = True
    cache_bytes: int = 64
    instruction_cache_bytes: int = 32768
    instruction_line_bytes: int = 64
    lds_latency: int = 64
    memory_latency: int = 500
    scalar_latency: int = 200


@dataclass(frozen=True)
class Timing:
    """Cycles per wave of a SIMD that always has its full number of waves, and the shares of that time in which its
    units are busy.
    """

    cycles: float
    matrix_share: float
    vector_share: float
    lds_share: float


@dataclass(frozen=True)
class _Issue:
    """What an instruction asks of the SIMD: its unit, the cycles for which it keeps the unit and the wave, and when
    its result is there.
    """

    unit: str = ""
    busy: float = 0
    holds: int = 4
    latency: int = 0
    counter: str = ""  # "vm" or "lgkm": its end is waited for there
    waits: tuple[tuple[str, int], ...] = ()


def time_of(program: Program, trace: Trace, waves_per_simd: int, rates: Rates | None = None) -> Timing:
    """Issue a traced wave's instructions on a SIMD that holds `waves_per_simd` of them
    (`Architecture.waves_per_simd`).
    """
    rates = rates or Rates()
    known = {step: _issue(program, *step, rates) for step in set(trace)}
    fetch = _Issue(holds=rates.memory_latency)
    lost = _lost_lines(program, trace, rates)
    issues = [
        issue
        for place, step in enumerate(trace)
        for issue in ((fetch, known[step]) if place in lost else (known[step],))
    ]
    simd = _Simd([_Wave(issues) for _ in range(max(1, waves_per_simd))])
    total, played = simd.play(_SUCCESSORS * len(simd.waves))
    shares = {unit: busy / total for unit, busy in simd.busy.items()}
    return Timing(total / played, *(shares.get(unit, 0.0) for unit in ("matrix", "vector", "lds")))


def matrix_flops(instruction: Instruction) -> int:
    """FLOPs of a matrix instruction; 0 for every other."""
    found = _MATRIX.match(instruction.mnemonic)
    return 2 * math.prod(map(int, found.groups())) if found else 0


def _lost_lines(program: Program, trace: Trace, rates: Rates) -> set[int]:
    """Places in the trace where the cache no longer has the instruction's line; what earlier workgroups left is
    there at the start.
    """
    held: dict[int, None] = {}  # lines, the one that was used last at the end
    lost = set()
    for place, (index, _) in enumerate(trace * 2):
        line = program.instructions[index].address // rates.instruction_line_bytes
        if line not in held and place >= len(trace):
            lost.add(place - len(trace))
        held.pop(line, None)
        held[line] = None
        if len(held) > rates.instruction_cache_bytes // rates.instruction_line_bytes:
            del held[next(iter(held))]
    return lost


def _issue(program: Program, index: int, bank_cycles: int, rates: Rates) -> _Issue:
    """`bank_cycles`: what the trace says of its access to the LDS."""
    instruction = program.instructions[index]
    name = instruction.mnemonic
    if flops := matrix_flops(instruction):
        return _Issue("matrix", flops * SIMDS / rates.matrix_flops)
    if name == "s_nop":
        return _Issue(holds=4 * (int(instruction.operands[0], 0) + 1))
    if name == "s_waitcnt":
        waits = ((counter.removesuffix("cnt"), int(left)) for counter, left in instruction.modifiers.items())
        return _Issue(waits=tuple(wait for wait in waits if wait[0] != "exp"))
    if name.startswith("v_"):
        cycles = 16 if _QUARTER_RATE.match(name) else 4
        return _Issue("vector", cycles, cycles)
    if made := access(instruction, program.descriptor):
        if made.scalar:
            return _Issue("scalar", 4, latency=rates.scalar_latency, counter="lgkm")
        if made.counter == "lgkm":
            served = max(LANES * made.size / rates.lds_bytes, bank_cycles if rates.bank_conflicts else 0)
            return _Issue("lds", served * SIMDS, latency=rates.lds_latency, counter="lgkm")
        return _Issue(
            "memory", LANES * made.size * SIMDS / rates.cache_bytes, latency=rates.memory_latency, counter="vm"
        )
    return _Issue("scalar", 4)


@dataclass
class _Wave:
    issues: list[_Issue]
    at: int = 0
    ready: float = 0.0
    under_way: dict[str, deque[float]] = field(default_factory=lambda: {"vm": deque(), "lgkm": deque()})

    @property
    def ended(self) -> bool:
        return self.at == len(self.issues)

    def wait(self, waits: Sequence[tuple[str, int]]) -> None:
        """Until at most so many accesses of a counter are under way."""
        for counter, left in waits:
            queue = self.under_way[counter]
            while len(queue) > left:
                self.ready = max(self.ready, queue.popleft())


class _Simd:
    """`waves`: the oldest first."""

    def __init__(self, waves: list[_Wave]) -> None:
        self.waves = waves
        self.free: dict[str, float] = dict.fromkeys(("matrix", "vector", "lds", "memory", "scalar"), 0.0)
        self.busy: dict[str, float] = dict.fromkeys(self.free, 0.0)

    def play(self, waves: int) -> tuple[float, float]:
        """Until one ends and these many have been there: where one ends the next begins. Returns the time, and the
        waves played, of which some in part.
        """
        ended = 0
        while True:
            wave = min(self.waves, key=self._start)  # of those that could issue first, the oldest does
            self._issue(wave)
            if not wave.ended:
                continue
            ended += 1
            self.waves.remove(wave)
            if ended + len(self.waves) == waves:
                return wave.ready, ended + sum(other.at / len(other.issues) for other in self.waves)
            self.waves.append(_Wave(wave.issues, ready=wave.ready))

    def _start(self, wave: _Wave) -> float:
        issue = wave.issues[wave.at]
        if not issue.unit:
            return wave.ready
        # a matrix instruction passes through the vector units' issue port
        return max(wave.ready, self.free[issue.unit], self.free["vector"] if issue.unit == "matrix" else 0.0)

    def _issue(self, wave: _Wave) -> None:
        issue = wave.issues[wave.at]
        start = self._start(wave)
        wave.at += 1
        wave.ready = start + issue.holds
        if issue.unit:
            self.free[issue.unit] = start + issue.busy
            self.busy[issue.unit] += issue.busy
        if issue.unit == "matrix":
            self.free["vector"] = start + issue.holds
            self.busy["vector"] += issue.holds
        if issue.counter:
            wave.under_way[issue.counter].append(start + issue.busy + issue.latency)
        wave.wait(issue.waits)
