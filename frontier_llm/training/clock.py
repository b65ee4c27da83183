"""Measures a rank's time: forward, backward, data, optimizer, and the time blocked in communication on each axis."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch

from frontier_llm.comm import Ledger
from frontier_llm.schedule import Action, Kind
from frontier_llm.training.build import TrainState


class PhaseClock:
    """Measures the seconds that a rank spends in each phase of a step.

    Time blocked in communication counts for the axis of the communication, and not for the phase.

    With `synchronize`, the host waits for the device at each change of phase. The times of a GPU are then exact, but
    the step is slower. Only benchmarks use this mode. Without `synchronize`, the times of a GPU run are host times,
    which show a slow host, but not a slow kernel.
    """

    def __init__(self, ledger: Ledger, synchronize: bool = False) -> None:
        self._ledger = ledger
        self._synchronize = synchronize and torch.cuda.is_available()
        self._seconds: dict[str, float] = defaultdict(float)
        self._phase = "optimizer"
        self._reading_phase = "optimizer"  # phase in which a microbatch is read; it continues after the read
        self._since = time.perf_counter()
        self._blocked_since = self._blocked()
        self._blocked_taken: dict[str, float] = defaultdict(float)

    def attach(self, state: TrainState) -> None:
        """Measure the pipeline engine and the data feed of `state` from now on."""
        state.pipeline.on_action = self.on_action
        state.feed.on_read = self.on_read

    def enter(self, phase: str) -> None:
        """End the previous phase and begin `phase`."""
        if self._synchronize:
            torch.cuda.synchronize()
        now = time.perf_counter()
        blocked = self._blocked()
        self._seconds[self._phase] += now - self._since - (blocked - self._blocked_since)
        self._phase = phase
        self._since = now
        self._blocked_since = blocked

    def on_action(self, action: Action | None) -> None:
        """Callback of `Engine`: begin the phase "forward" or "backward" with each action that computes.

        After the last action of a step, which is reported as None, begin the phase "optimizer".
        """
        if action is None:
            self.enter("optimizer")
        elif action.kind.computes:
            self.enter("forward" if action.kind is Kind.FORWARD else "backward")

    def on_read(self, index: int | None) -> None:
        """Callback of `Feed`: counts the time of reading as "data" instead of the current phase."""
        if index is None:
            self.enter(self._reading_phase)
        else:
            self._reading_phase = self._phase
            self.enter("data")

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call. The keys are phases, and axes as "tp (blocked)" for blocked time."""
        self.enter(self._phase)
        taken = dict(self._seconds)
        self._seconds.clear()
        by_axis: dict[str, float] = defaultdict(float)
        for (axis, _), seconds in self._ledger.blocked_s.items():
            by_axis[f"{axis.split('.')[0]} (blocked)"] += seconds
        for name, seconds in by_axis.items():
            taken[name] = seconds - self._blocked_taken[name]
        self._blocked_taken = by_axis
        return taken

    def communication(self) -> dict[str, Any]:
        """Return statistics of this rank's communication since it joined the job.

        The keys are `operations` (Ledger.summary), `axes` (Ledger.latency_by_axis), `most_in_flight` and `not_counted`.
        """
        return {
            "not_counted": self._ledger.not_counted,
            "operations": self._ledger.summary(),
            "axes": self._ledger.latency_by_axis(),
            "most_in_flight": self._ledger.most_in_flight,
        }

    def _blocked(self) -> float:
        return sum(self._ledger.blocked_s.values())
