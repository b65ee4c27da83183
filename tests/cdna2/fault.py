"""Errors of the simulator, and the rules that a kernel can break."""

from __future__ import annotations


class SimulatorError(Exception):
    """The simulator cannot execute a request. The message states the place, the problem and the repair."""

    def __init__(self, what: str, fix: str = "", where: str = "") -> None:
        self.what = what
        self.fix = fix
        self.where = where
        place = f"{where}: " if where else ""
        repair = f"\n  fix: {fix}" if fix else ""
        super().__init__(f"{place}{what}{repair}")


class Fault(SimulatorError):
    """A kernel broke a rule of the machine, or uses an instruction that the simulator does not know."""


class Violation(Exception):
    """A broken rule, raised by one instruction. The simulator turns it into a Fault that names the place.

    `wave` is the index among the waves that step together.
    """

    def __init__(self, what: str, wave: int = 0, lane: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.wave = wave
        self.lane = lane
