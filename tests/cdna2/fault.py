"""What a kernel did that the machine would not have forgiven, or would have forgiven in silence."""

from __future__ import annotations

from frontier_llm.errors import FrontierError


class Fault(FrontierError):
    """A kernel broke a rule: which one, and where."""

    exit_code = 1


class Violation(Exception):
    """A broken rule as the instruction sees it; `wave` counts within the waves that step together. The simulator
    makes a Fault of it.
    """

    def __init__(self, what: str, wave: int = 0, lane: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.wave = wave
        self.lane = lane
