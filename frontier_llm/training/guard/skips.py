"""Detects loss spikes, and handles skipped steps: records them, rewinds the run, and stops it after too many in a row.

A spike is a step with a loss or gradient norm far above the values of the last steps. Mean + 6 standard deviations over
128 steps is OLMo's rule (2 OLMo 2 Furious, 2025). Loss and gradient norm are equal on every rank, so all ranks decide
the same without communication. The remembered values are part of the checkpoint, so a resumed run decides like an
uninterrupted run.

PaLM's reaction to a spike was to go back some 100 steps and leave out 200-500 batches (Chowdhery et al. 2022).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from frontier_llm import log
from frontier_llm.checkpoint.checkpoints import Checkpoints
from frontier_llm.checkpoint.manifest import Progress
from frontier_llm.config import GuardConfig
from frontier_llm.errors import FrontierError
from frontier_llm.files import write_atomically
from frontier_llm.run import run_dir
from frontier_llm.units import strict_json


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


# largest number of rewinds to one checkpoint; by then other data has not helped, and the run would repeat itself
MOST_REWINDS = 3


class Skips:
    """Counts skipped steps. Decides the same on every rank, because all ranks have the same losses."""

    def __init__(self, config: GuardConfig, decisions: Decisions, checkpoints: Checkpoints) -> None:
        self._config = config
        self._decisions = decisions
        self._checkpoints = checkpoints
        self._in_row = 0

    def accepted(self) -> None:
        """Record that a step was not skipped."""
        self._in_row = 0

    def skipped(self, step: int, loss: float, gradient_norm: float, spike: bool) -> Progress | None:
        """Handle the skipped step `step`.

        Returns the progress of the checkpoint to which the run goes back, which is then loaded, or None to continue.
        Raises FrontierError after guard.max_skips_in_row.
        """
        self._in_row += 1
        self._decisions.add(
            step, "spike" if spike else "not finite", loss=repr(loss), gradient_norm=repr(gradient_norm)
        )
        if self._in_row >= self._config.max_skips_in_row:
            raise FrontierError(
                f"{self._in_row} steps in a row were skipped; at the last one loss was {loss}, gradient norm "
                f"{gradient_norm}",
                "lower optimizer.lr, look at the data of these steps (decisions.jsonl), or raise "
                "guard.max_skips_in_row",
                f"step {step}",
            )
        return self._rewind(step) if spike and self._config.spike_action == "rewind" else None

    def _rewind(self, step: int) -> Progress | None:
        """Load a checkpoint from before the spike. Returns None if the step is only skipped."""
        target = self._checkpoints.newest_at_most(step - self._config.rewind_steps)
        if target is not None and self._decisions.rewinds_to(target) >= MOST_REWINDS:
            log.info(f"spike at step {step}: after {MOST_REWINDS} rewinds to step {target} it is skipped instead")
            return None
        progress = self._checkpoints.rewind(step - self._config.rewind_steps)
        if progress is None:
            log.info(
                f"no checkpoint is {self._config.rewind_steps} steps older than the spike at step {step}: the step "
                f"is skipped instead"
            )
            return None
        return progress

    def rewound(self, spike_at: int, step: int, left_out_samples: int, samples: int) -> None:
        """Record that the run has gone back to `step` and leaves out the next `samples` samples.

        `left_out_samples` counts the samples left out since the run began.
        """
        self._decisions.add(step, "rewind", spike_at=spike_at, left_out_samples=left_out_samples)
        log.info(f"spike at step {spike_at}: the run goes back to step {step}, leaving out {samples} samples of data")


class Decisions:
    """Records the decisions that changed the course of the run, one JSON line each, in `decisions.jsonl`.

    A resume drops the lines of steps that the run repeats. The same decisions write them again.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` is None on ranks that do not write the file."""
        self._path = path
        # Part of the checkpoint, because rewinds belong to its history.
        self.rewinds: list[dict[str, Any]] = []

    def add(self, step: int, action: str, **details: Any) -> None:
        """Record a decision about step `step`."""
        entry = {"step": step, "action": action, **details}
        if action == "rewind":
            self.rewinds = [*(known for known in self.rewinds if known["step"] <= step), entry]
            self._write(
                [*(known for known in self.entries() if known["step"] < step or known["action"] == "rewind"), entry]
            )
            return
        if self._path is not None:
            run_dir.append_line(self._path, entry)

    def rewinds_to(self, step: int) -> int:
        """Return the number of rewinds to that checkpoint."""
        return sum(entry["step"] == step for entry in self.rewinds)

    def resume_at(self, step: int, rewinds: list[dict[str, Any]]) -> None:
        """Continue from a checkpoint: keep its rewinds, and the other decisions of the steps before it."""
        self.rewinds = rewinds
        earlier = [entry for entry in self.entries() if entry["step"] < step and entry["action"] != "rewind"]
        self._write(sorted([*earlier, *rewinds], key=lambda entry: int(entry["step"])))

    def _write(self, entries: list[dict[str, Any]]) -> None:
        if self._path is not None and (entries or self._path.exists()):
            write_atomically(self._path, "".join(strict_json(entry, indent=None) + "\n" for entry in entries))

    def entries(self) -> list[dict[str, Any]]:
        """Return the decisions of all complete lines."""
        return list(run_dir.read_jsonl(self._path)) if self._path is not None else []
