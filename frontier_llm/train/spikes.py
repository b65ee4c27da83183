"""Loss spikes: steps far outside of what the last ones were are skipped, or the run goes back and passes the data by.

Skipping at mean + 6 standard deviations over 128 steps is OLMo's rule (2 OLMo 2 Furious, 2025); PaLM (Chowdhery et al. 2022) went back
some 100 steps and left out 200-500 batches. Loss and gradient norm are the same number on every rank, so all ranks decide alike
without asking each other; what the rule remembers is part of the checkpoint, so a resumed run decides as an undisturbed one.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any


class SpikePolicy:
    """Judges each step by the accepted ones before it."""

    def __init__(self, sigmas: float, window: int) -> None:
        """`sigmas` = 0 switches it off. Nothing is judged until `window` steps have been accepted."""
        self._sigmas, self._window = sigmas, window
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)

    def is_spike(self, loss: float, gradient_norm: float) -> bool:
        """True when either is more than `sigmas` above the mean; accepted values are remembered, spikes are not."""
        if self._sigmas == 0:
            return False
        if len(self._losses) == self._window and (self._far(loss, self._losses) or self._far(gradient_norm, self._norms)):
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


class Decisions:
    """What changed the course of the run, one JSON line each, in `decisions.jsonl`.

    Lines of steps that a resumed run does again are dropped at the resume and written again by the same decisions.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` is None on the ranks that only remember."""
        self._path = path
        self.rewinds: list[dict[str, Any]] = []  # part of the checkpoint: they belong to its course, whenever they were taken

    def add(self, step: int, action: str, **details: Any) -> None:
        """Record a decision about step `step`."""
        entry = {"step": step, "action": action, **details}
        if action == "rewind":
            self.rewinds = [*(known for known in self.rewinds if known["step"] <= step), entry]
            self._write([*(known for known in self.entries() if known["step"] < step or known["action"] == "rewind"), entry])
            return
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def rewinds_to(self, step: int) -> int:
        """How often the run has gone back to that checkpoint."""
        return sum(entry["step"] == step for entry in self.rewinds)

    def resume_at(self, step: int, rewinds: list[dict[str, Any]]) -> None:
        """Go on from a checkpoint: its rewinds, and the other decisions of the steps before it."""
        self.rewinds = rewinds
        kept = [entry for entry in self.entries() if entry["step"] < step and entry["action"] != "rewind"]
        self._write(sorted([*kept, *rewinds], key=lambda entry: int(entry["step"])))

    def _write(self, entries: list[dict[str, Any]]) -> None:
        if self._path is not None:
            building = self._path.with_suffix(".tmp")
            building.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
            os.replace(building, self._path)

    def entries(self) -> list[dict[str, Any]]:
        """All complete lines."""
        if self._path is None or not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline was torn by a crash
        return [json.loads(line) for line in lines]
