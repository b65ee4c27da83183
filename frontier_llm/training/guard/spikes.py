"""Which step is a loss spike: far outside of what the last ones were. What follows from it is decided in `skips`.

Mean + 6 standard deviations over 128 steps is OLMo's rule (2 OLMo 2 Furious, 2025). Loss and gradient norm are the same
number on every rank, so all ranks decide alike without asking each other; what the rule remembers is part of the
checkpoint, so a resumed run decides as an undisturbed one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import fmean, pstdev
from typing import Any


class SpikePolicy:
    """Judges each step by the accepted ones before it."""

    def __init__(self, sigmas: float, window: int) -> None:
        """`sigmas` = 0 switches it off. Nothing is judged until `window` steps have been accepted."""
        self._sigmas = sigmas
        self._window = window
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)

    def is_spike(self, loss: float, gradient_norm: float) -> bool:
        """True when either is more than `sigmas` above the mean; accepted values are remembered, spikes are not."""
        if self._sigmas == 0:
            return False
        if len(self._losses) == self._window and (
            self._far(loss, self._losses) or self._far(gradient_norm, self._norms)
        ):
            return True
        self._losses.append(loss)
        self._norms.append(gradient_norm)
        return False

    def _far(self, value: float, before: Iterable[float]) -> bool:
        values = list(before)
        return value > fmean(values) + self._sigmas * pstdev(values)

    def state(self) -> dict[str, Any]:
        """For Progress.policy; floats survive JSON exactly."""
        return {"losses": list(self._losses), "norms": list(self._norms)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self._losses = deque(state.get("losses", ()), maxlen=self._window)
        self._norms = deque(state.get("norms", ()), maxlen=self._window)
