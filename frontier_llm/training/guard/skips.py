"""Detects loss spikes, and handles skipped steps: records them, rewinds the run, and stops it after too many in a row.

A spike is a step whose loss or gradient norm is far above the values of the last steps. The user sets the limit
(`guard.spike_sigmas`). OLMo uses the mean + 6 standard deviations over 128 steps (2 OLMo 2 Furious, 2025). Loss and
gradient norm are equal on every rank, so all ranks decide the same without communication. A checkpoint contains the
values of the last steps, so a resumed run decides like an uninterrupted run.

After a spike, PaLM was restarted some 100 steps earlier, and 200-500 batches were left out (Chowdhery et al. 2022).
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
from frontier_llm.errors import SkippedSteps
from frontier_llm.files import write_atomically
from frontier_llm.run import run_dir
from frontier_llm.units import strict_json


class SpikePolicy:
    """Detects loss spikes: compares the loss and gradient norm of each step with the last accepted steps."""

    def __init__(self, sigmas: float, window: int) -> None:
        """`sigmas` = 0 disables the detection. No step counts as a spike until `window` steps have been accepted."""
        self._sigmas = sigmas
        self._window = window
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)

    def is_spike(self, loss: float, gradient_norm: float) -> bool:
        """Return True if either value is more than `sigmas` standard deviations above its mean.

        The mean covers the last `window` accepted steps. The values of a spike are not added to it.
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
        """Return the values of the last accepted steps, for `Progress.policy`. JSON stores the floats exactly."""
        return {"losses": list(self._losses), "norms": list(self._norms)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the values that `state()` returned."""
        self._losses = deque(state.get("losses", ()), maxlen=self._window)
        self._norms = deque(state.get("norms", ()), maxlen=self._window)


# Largest number of rewinds to one checkpoint. If the spike appears again with other data each time, more rewinds would
# not help.
MOST_REWINDS = 3
KEPT = ("rewind", run_dir.SWITCH)  # actions whose lines a rewind keeps, because no repeated step writes them again


class Skips:
    """Counts consecutive skipped steps, and decides whether the run continues, rewinds or stops.

    All ranks make the same decision, because all ranks have the same losses.
    """

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

        If the run goes back to a checkpoint, load this checkpoint and return its progress. Return None if the run
        continues. Raises SkippedSteps after guard.max_skips_in_row skipped steps in a row.
        """
        self._in_row += 1
        self._decisions.add(
            step, "spike" if spike else "not finite", loss=repr(loss), gradient_norm=repr(gradient_norm)
        )
        if self._in_row >= self._config.max_skips_in_row:
            raise SkippedSteps(
                f"{self._in_row} steps in a row were skipped; at the last one loss was {loss}, gradient norm "
                f"{gradient_norm}",
                "lower optimizer.lr, inspect the data of these steps (decisions.jsonl), or raise "
                "guard.max_skips_in_row",
                f"step {step}",
            )
        return self._rewind(step) if spike and self._config.spike_action == "rewind" else None

    def _rewind(self, step: int) -> Progress | None:
        """Load a checkpoint that was written before the spike, and return its progress.

        Returns None if the step is only skipped.
        """
        target = self._checkpoints.newest_at_most(step - self._config.rewind_steps)
        if target is not None and self._decisions.rewinds_to(target) >= MOST_REWINDS:
            log.info(f"spike at step {step}: after {MOST_REWINDS} rewinds to step {target} the step is skipped instead")
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
    """Writes `decisions.jsonl`: one JSON line for each skipped step, rewind and similar decision of the run.

    A resume drops the lines of steps that the run repeats. The repeated steps write these lines again. The
    supervisor's lines (`run_dir.SWITCH`) are kept.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` is None on ranks that do not write the file."""
        self._path = path
        # Checkpoints contain this list, because the weights of a checkpoint depend on the rewinds before it.
        self.rewinds: list[dict[str, Any]] = []

    def add(self, step: int, action: str, **details: Any) -> None:
        """Record a decision about step `step`."""
        entry = {"step": step, "action": action, **details}
        if action == "rewind":
            self.rewinds = [*(known for known in self.rewinds if known["step"] <= step), entry]
        if self._path is None:
            return
        try:
            if action == "rewind":
                kept = [known for known in self.entries() if known["step"] < step or known["action"] in KEPT]
                self._write([*kept, entry])
            else:
                run_dir.append_line(self._path, entry)
        except OSError as error:  # a full disk does not end the run, just as a lost line of metrics.jsonl does not
            log.warn(f"a decision is missing in {self._path}: {error.strerror}: {entry}")

    def rewinds_to(self, step: int) -> int:
        """Return the number of rewinds to the checkpoint of step `step`."""
        return sum(entry["step"] == step for entry in self.rewinds)

    def resume_at(self, step: int, rewinds: list[dict[str, Any]]) -> None:
        """Continue from the checkpoint of step `step`. Keep the rewinds that the checkpoint records (`rewinds`), and
        all other decisions before this step.
        """
        self.rewinds = rewinds
        others = [entry for entry in self.entries() if entry["action"] != "rewind"]
        kept = [entry for entry in others if entry["step"] < step or entry["action"] in KEPT]
        self._write(sorted([*kept, *rewinds], key=lambda entry: int(entry["step"])))

    def _write(self, entries: list[dict[str, Any]]) -> None:
        if self._path is not None and (entries or self._path.exists()):
            write_atomically(self._path, "".join(strict_json(entry, indent=None) + "\n" for entry in entries))

    def entries(self) -> list[dict[str, Any]]:
        """Return all decisions of the file. A line that was cut off by a crash is left out."""
        return list(run_dir.read_jsonl(self._path)) if self._path is not None else []
