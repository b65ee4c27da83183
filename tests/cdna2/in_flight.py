"""Tracks loads in flight. A kernel may not use a register before it has waited (s_waitcnt) for the register's load."""

from __future__ import annotations

import numpy as np

from .access import Access
from .disassembly import Instruction
from .fault import Violation
from .state import Array, Waves

_COUNTERS = ("vm", "lgkm")


class InFlight:
    """The memory instructions that have not ended. They end in the order of their issue. After a wait for all but n,
    only the last n are in flight. Scalar loads are the exception: they end in any order.
    """

    def __init__(self, count: int) -> None:
        self._issued = {counter: np.zeros(count, np.int64) for counter in _COUNTERS}
        self._ended = {counter: np.zeros(count, np.int64) for counter in _COUNTERS}
        self._last_scalar: Array = np.zeros(count, np.int64)
        self._last_local: Array = np.zeros(count, np.int64)
        # register -> counter -> per wave, the load's number in the order of issue. Waves on different branches may load
        # the same register with different counters.
        self.registers: dict[tuple[bool, int], dict[str, Array]] = {}

    def check(self, waves: Waves, touched: frozenset[tuple[bool, int]], by: Access | None) -> None:
        """Raise Violation if a chosen wave uses a register before it has waited for the register's load."""
        for register in touched & self.registers.keys():
            for counter, issue in self.registers[register].items():
                if by and register in by.loads and by.counter == counter and not by.scalar:
                    continue  # loads with the same counter arrive in the order of issue
                early = issue[waves.chosen] > self._ended[counter][waves.chosen]
                if early.any():
                    name = f"{'v' if register[0] else 's'}{register[1]}"
                    raise Violation(
                        f"{name} is touched while its load is in flight: an s_waitcnt is missing", int(np.argmax(early))
                    )

    def issue(self, waves: Waves, access: Access) -> None:
        """Record that the chosen waves begin a memory access."""
        issued = self._issued[access.counter]
        issued[waves.chosen] += 1
        if access.scalar:
            self._last_scalar[waves.chosen] = issued[waves.chosen]
        elif access.counter == "lgkm":
            self._last_local[waves.chosen] = issued[waves.chosen]
        for register in access.loads:
            issue = self.registers.setdefault(register, {}).setdefault(access.counter, np.zeros_like(issued))
            issue[waves.chosen] = issued[waves.chosen]

    def wait(self, waves: Waves, instruction: Instruction) -> None:
        """Execute s_waitcnt for the chosen waves."""
        for name, text in instruction.modifiers.items():
            counter = name.removesuffix("cnt")
            if counter == "exp":
                continue
            left = int(text)
            chosen = waves.chosen
            ended = self._issued[counter][chosen] - left
            if counter == "lgkm" and left:
                ended = np.where(self._last_scalar[chosen] > self._ended[counter][chosen], 0, ended)
            self._ended[counter][chosen] = np.maximum(self._ended[counter][chosen], ended)
        for register, issues in list(self.registers.items()):
            left_over = {counter: issue for counter, issue in issues.items() if (issue > self._ended[counter]).any()}
            if left_over:
                self.registers[register] = left_over
            else:
                del self.registers[register]

    def check_barrier(self, waves: Waves) -> None:
        """Raise Violation if LDS accesses may still be in flight, because then the barrier would not order them."""
        early = self._last_local[waves.chosen] > self._ended["lgkm"][waves.chosen]
        if early.any():
            raise Violation(
                "a barrier while LDS accesses are in flight: s_waitcnt lgkmcnt(0) is missing", int(np.argmax(early))
            )
