"""What a run keeps on disk: begins saves, follows them between the steps, bears one failure.

A kill costs the steps since the newest checkpoint on disk. While a save is being written that is the one before, so the
writing is bounded too: `lag_steps` after the copy training waits for it. At most save_interval + lag_steps are lost,
with lag 0 one interval.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from frontier_llm import log
from frontier_llm.checkpoint import CheckpointManager, Progress, Superseded
from frontier_llm.errors import CheckpointError


class Saves:
    """The loop's view of its checkpoints. Every method is collective over the world and returns or raises alike on
    all ranks.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        lag_steps: int,
        before: Callable[[int], None],
        on_saved: Callable[[int, Path], None],
    ) -> None:
        """`before(step)` runs ahead of each save and may refuse it by raising; `on_saved(step, path)` when LATEST
        has moved there.
        """
        self._manager = manager
        self._lag_steps = lag_steps
        self._before = before
        self._on_saved = on_saved
        self._step = -1  # of the newest checkpoint, under way or on disk
        self._failures_in_row = 0

    def resume(self, strict: bool) -> Progress | None:
        """Load the newest intact checkpoint (`strict`: the newest, or raise); None in a new run."""
        progress = self._manager.load_latest(strict)
        if progress is None:
            log.info(f"no checkpoint in {self._manager.directory}: starting from step 0")
            return None
        self._step = progress.step
        log.info(f"resuming after step {progress.step} ({progress.tokens:,} tokens)")
        return progress

    def begin(self, progress: Progress) -> None:
        """Copy the state and write it in the background. The first failure is only logged, the second in a row
        raised.
        """
        if self._step != progress.step:
            self._attempt(lambda: self._start(progress))
            self.follow(progress.step)

    def finish(self, progress: Progress) -> None:
        """Have this step on disk when this returns. Raises CheckpointError: no other save would follow."""
        if self._step != progress.step:
            self._start(progress)
        self._note(self._manager.wait(audit=False))

    def follow(self, step: int) -> None:
        """`step` steps are done: move a save that is under way on, and wait for one that is late."""
        late = step - self._step >= self._lag_steps
        self._attempt(lambda: self._note(self._manager.poll() or (self._manager.wait(audit=False) if late else None)))

    def newest_at_most(self, step: int) -> int | None:
        """The newest complete checkpoint that is not younger than `step`."""
        return self._manager.newest_at_most(step)

    def rewind(self, before: int) -> Progress | None:
        """Load the newest checkpoint of at most step `before`, delete the younger ones; None when there is none."""
        progress = self._manager.rewind(before)
        if progress is not None:
            self._step = -1
        return progress

    def close(self, audit: bool) -> None:
        """Finish what is under way, with `audit` also reading back and pruning, and give the run directory up."""
        self._note(self._manager.wait(audit=False))
        self._manager.close(audit)

    def _start(self, progress: Progress) -> None:
        self._before(progress.step)
        self._manager.start_save(progress)
        self._step = progress.step

    def _note(self, path: Path | None) -> None:
        if path is not None:
            self._failures_in_row = 0
            log.info(f"saved {path}")
            self._on_saved(self._step, path)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Train on after one failed save, the checkpoints before it are intact."""
        try:
            work()
        except CheckpointError as error:
            self._failures_in_row = self._failures_in_row + 1
            self._step = -1
            if self._failures_in_row > 1 or isinstance(error, Superseded):
                raise
            log.info(f"a save failed, training goes on and stops if the next one fails too\n{error}")
