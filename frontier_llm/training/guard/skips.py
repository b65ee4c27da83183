"""After a step that changed nothing: write it down, go back if the run says so, stop when nothing but skips happen.

Going back some 100 steps and leaving out 200-500 batches is PaLM's answer to a spike (Chowdhery et al. 2022).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from frontier_llm import log
from frontier_llm.checkpoint.checkpoints import Checkpoints
from frontier_llm.checkpoint.manifest import Progress
from frontier_llm.config import GuardConfig
from frontier_llm.errors import FrontierError
from frontier_llm.files import write_atomically
from frontier_llm.run import run_dir
from frontier_llm.units import strict_json

MOST_REWINDS = 3  # to one checkpoint: then other data has not helped, and the run must not go in circles


class Skips:
    """Counts skipped steps and decides alike on every rank, because all see the same losses."""

    def __init__(self, config: GuardConfig, decisions: Decisions, checkpoints: Checkpoints) -> None:
        self._config = config
        self._decisions = decisions
        self._checkpoints = checkpoints
        self._in_row = 0

    def accepted(self) -> None:
        """The step was taken."""
        self._in_row = 0

    def skipped(self, step: int, loss: float, gradient_norm: float, spike: bool) -> Progress | None:
        """Step `step` was not taken. Returns what the run goes back to, loaded already, or None to go on.

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
        """Back to a checkpoint from before the spike, past the data that led to it."""
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
        """The run has gone back to `step` and leaves out the next `samples` samples, `left_out_samples` since it
        began.
        """
        self._decisions.add(step, "rewind", spike_at=spike_at, left_out_samples=left_out_samples)
        log.info(f"spike at step {spike_at}: back to step {step}, leaving out {samples} samples of data")


class Decisions:
    """What changed the course of the run, one JSON line each, in `decisions.jsonl`.

    Lines of steps that a resumed run does again are dropped at the resume and written again by the same decisions.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` is None on the ranks that only remember."""
        self._path = path
        # part of the checkpoint: they belong to its course, whenever they were taken
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
        """How often the run has gone back to that checkpoint."""
        return sum(entry["step"] == step for entry in self.rewinds)

    def resume_at(self, step: int, rewinds: list[dict[str, Any]]) -> None:
        """Go on from a checkpoint: its rewinds, and the other decisions of the steps before it."""
        self.rewinds = rewinds
        earlier = [entry for entry in self.entries() if entry["step"] < step and entry["action"] != "rewind"]
        self._write(sorted([*earlier, *rewinds], key=lambda entry: int(entry["step"])))

    def _write(self, entries: list[dict[str, Any]]) -> None:
        if self._path is not None and (entries or self._path.exists()):
            write_atomically(self._path, "".join(strict_json(entry, indent=None) + "\n" for entry in entries))

    def entries(self) -> list[dict[str, Any]]:
        """All complete lines."""
        return list(run_dir.read_jsonl(self._path)) if self._path is not None else []
