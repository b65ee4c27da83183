"""A timing model: the cycles that a compute unit takes for a kernel, from the instructions that one wave executed.

The model simulates one SIMD with its full number of waves. Each wave is a copy of the traced wave, and when it ends
another copy begins. The SIMD has a quarter of the LDS and cache bandwidth that the four SIMDs of a compute unit share.
A wave issues its instructions in order. Waves overlap if they use different units; otherwise the oldest goes first. The
code itself contains the waits for results: s_nop for vector and matrix instructions, s_waitcnt for memory. An LDS
access takes the cycles that its addresses need with the LDS' banks. An instruction cache miss costs the latency of a
load. The model lets all waves of a workgroup arrive at a barrier at the same time. It was not compared with hardware.

A share of the matrix rate by this model is an upper bound: the model has no clocks under load, no contention for L2 and
HBM, and no hazards between matrix instructions beyond the waits in the code.
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

SIMDS: Final = 4  # SIMDs per compute unit.
# Number of waves that run one after another in each slot of the SIMD. All slots begin together and later drift apart.
_SUCCESSORS: Final = 4
_QUARTER_RATE = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_f|v_mul_(lo|hi)_|v_mad_[ui]64_")
_MATRIX = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True)
class Rates:
    """Rates and latencies of a compute unit of the MI250X, per cycle and in cycles of its clock.

    Matrix rate: 191.5 TFLOP/s per GCD of 110 compute units at 1.7 GHz (AMD, CDNA 2 white paper) are 1024 FLOP per
    cycle. LDS: 128 bytes per cycle, vector L1: 64 bytes. The instruction cache of 32 KiB has lines of 64 bytes and
    serves two compute units (Linux, amdkfd's tables for Aldebaran), which run the same kernel here. The latencies are
    assumptions: about 64 cycles for an LDS access, and about 500 for a load that hits L2 in a busy memory system.
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
    """Cycles per wave on a SIMD with its full number of waves, and for each unit the share of the time in which it is
    busy.
    """

    cycles: float
    matrix_share: float
    vector_share: float
    lds_share: float


@dataclass(frozen=True)
class _Issue:
    """The cost of an instruction: its unit, the cycles for which it occupies the unit (`busy`) and the wave (`holds`),
    and the cycles until its result arrives (`latency`).
    """

    unit: str = ""
    busy: float = 0
    holds: int = 4
    latency: int = 0
    counter: str = ""  # counter with which s_waitcnt waits for the result: "vm" or "lgkm"
    waits: tuple[tuple[str, int], ...] = ()


def time_of(program: Program, trace: Trace, waves_per_simd: int, rates: Rates | None = None) -> Timing:
    """Return the time of a kernel whose traced wave runs on a SIMD in `waves_per_simd` copies at a time
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
    """Return the FLOPs of a matrix instruction, and 0 for any other instruction."""
    found = _MATRIX.match(instruction.mnemonic)
    return 2 * math.prod(map(int, found.groups())) if found else 0


def _lost_lines(program: Program, trace: Trace, rates: Rates) -> set[int]:
    """Return the places in the trace at which the instruction cache misses. At the start the cache holds the lines that
    an earlier workgroup of the same kernel left.
    """
    held: dict[int, None] = {}  # cache lines, the least recently used first
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
    """Return the cost of one instruction. `bank_cycles` are the LDS cycles that the trace records for it."""
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
        """Wait until at most `left` accesses of each counter are in flight."""
        for counter, left in waits:
            queue = self.under_way[counter]
            while len(queue) > left:
                self.ready = max(self.ready, queue.popleft())


class _Simd:
    """One SIMD. `waves` are its running waves, the oldest first."""

    def __init__(self, waves: list[_Wave]) -> None:
        self.waves = waves
        self.free: dict[str, float] = dict.fromkeys(("matrix", "vector", "lds", "memory", "scalar"), 0.0)
        self.busy: dict[str, float] = dict.fromkeys(self.free, 0.0)

    def play(self, waves: int) -> tuple[float, float]:
        """Run until a wave ends and `waves` waves have been started in total. When a wave ends, the next begins.

        Returns the time, and the number of waves that were executed. A wave that has not ended counts as a fraction.
        """
        ended = 0
        while True:
            wave = min(self.waves, key=self._start)  # among equal start times the oldest wave issues
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
        # a matrix instruction is issued through the vector unit's port
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
