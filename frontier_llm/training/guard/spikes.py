"""Detects loss spikes: steps with a loss or gradient norm far above the values of the last steps.

Mean + 6 standard deviations over 128 steps is OLMo's rule (2 OLMo 2 Furious, 2025). Loss and gradient norm are equal on
every rank, so all ranks decide the same without communication. The remembered values are part of the checkpoint, so a
resumed run decides like an uninterrupted run. `training.guard.skips` decides how a run reacts to spikes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import fmean, pstdev
from typing import Any


class SpikePolicy:
    """Compares each step with the accepted steps before it."""

    def __init__(self, sigmas: float, window: int) -> None:
        """`sigmas` = 0 disables the detection. Nothing is a spike until `window` steps have been accepted."""
        self._sigmas = sigmas
        self._window = window
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)

    def is_spike(self, loss: float, gradient_norm: float) -> bool:
        """Return True if either value is more than `sigmas` standard deviations above its mean.

        Values of accepted steps are remembered. Values of spikes are not.
        """
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
        """Return the remembered values for Progress.policy. JSON stores the floats exactly."""
        return {"losses": list(self._losses), "norms": list(self._norms)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the values that `state()` returned."""
        self._losses = deque(state.get("losses", ()), maxlen=self._window)
        self._norms = deque(state.get("norms", ()), maxlen=self._window)
