"""Asynchronous save of a checkpoint: a state machine with four stages that the training loop advances.

    write    every rank, in a thread: writes its shard from a copy of the state
    commit   rank 0, in a thread: writes the manifest, renames the folder, updates LATEST and BEST
    verify   every rank, in a thread: reads a part of the files of the newest checkpoints again and compares digests
    prune    rank 0, in a thread: deletes older checkpoints, unless the verification found damage

Between two training steps, all ranks agree whether to start the next stage. Training therefore waits only for the copy,
and no collective runs in a thread. All ranks report a failure at the same step.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frontier_llm import log
from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import load, shard
from frontier_llm.checkpoint.facts import build_manifest
from frontier_llm.checkpoint.lock import Superseded
from frontier_llm.checkpoint.manifest import Progress
from frontier_llm.checkpoint.ranks import from_rank_0, joint_error
from frontier_llm.comm import all_gather_json, maximum
from frontier_llm.errors import CheckpointError
from frontier_llm.failpoints import hit
from frontier_llm.run.threads import in_daemon

if TYPE_CHECKING:
    from frontier_llm.checkpoint.checkpoints import Checkpoints


PROGRESS_S = 1.0  # interval at which a rank that waits for its thread looks at the thread's progress


class SaveStage(IntEnum):
    """Stages of a save, in the order in which they run."""

    WRITE = 0
    COMMIT = 1
    VERIFY = 2
    PRUNE = 3
    OVER = 4


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, which LATEST names."""

    step: int
    path: Path


class Save:
    """One save in progress. Public methods are collective: all ranks return the same result or raise the same error."""

    def __init__(self, checkpoints: Checkpoints, progress: Progress) -> None:
        """Copy the state and start to write it. Returns after the copy.

        Raises CheckpointError if the folder cannot be created or the free space is too small. Raises Superseded if a
        newer start of the run has taken the lock.
        """
        self._checkpoints = checkpoints
        self._progress = progress
        self._late_from = progress.step + checkpoints.lag_steps
        self._stage = SaveStage.WRITE
        self._groups = 0  # number of groups of blocks that this rank's thread has written or read
        from_rank_0(self._make_folder, checkpoints.world, checkpoints.device)
        checkpoints.snapshot.take()
        hit("checkpoint.copied")
        self._task: Future[Any] = in_daemon(self._write, "checkpoint-write")

    @property
    def is_committed(self) -> bool:
        """True if LATEST names the new checkpoint."""
        return self._stage > SaveStage.COMMIT

    @property
    def is_over(self) -> bool:
        """True if the save is complete or has failed."""
        return self._stage is SaveStage.OVER

    def advance(self, steps_done: int) -> Saved | None:
        """Start the next stage if all ranks have finished the current stage.

        Call this method after every training step.

        If the run has done `train.save_lag_steps` steps since the copy, wait for the commit. The time of a save must be
        limited, because a kill loses all steps since the newest checkpoint.

        Returns the checkpoint in the first call after the commit. If a rank fails before the commit, the method raises
        CheckpointError with the problems of all ranks. The save is then over and its files are removed. Older
        checkpoints are unchanged. Failures after the commit are only logged.
        """
        saved = self._advance(block=False)
        if saved is None and steps_done >= self._late_from:
            return self.finish(verify=False)
        return saved

    def finish(self, verify: bool = True) -> Saved | None:
        """Wait until the save is over, or without `verify` until the commit. Returns and raises as `advance` does."""
        saved = None
        while not self.is_over and (verify or not self.is_committed):
            saved = self._advance(block=True) or saved
        return saved

    def _advance(self, block: bool) -> Saved | None:
        if self.is_over:
            return None
        world = self._checkpoints.world
        device = self._checkpoints.device
        is_done = self._wait() if block else self._task.done()
        error = self._task.exception() if is_done else None
        any_unfinished, any_failed = maximum([int(not is_done), int(error is not None)], world, device)
        if any_unfinished:
            return None
        if any_failed:
            self._fail(error)
            return None
        if self._stage is SaveStage.WRITE:
            files = all_gather_json(self._task.result(), world, device)
            self._start(SaveStage.COMMIT, lambda: self._commit(files))
        elif self._stage is SaveStage.COMMIT:
            self._start(SaveStage.VERIFY, self._verify)
            self._checkpoints.failures_in_row = 0
            step = self._progress.step
            return Saved(step, self._checkpoints.directory / folder.step_name(step))
        elif self._stage is SaveStage.VERIFY:
            self._start(SaveStage.PRUNE, self._prune)
        else:
            self._stage = SaveStage.OVER
        return None

    def _wait(self) -> bool:
        """Wait until this rank's work has ended, or has progressed for a second. Return whether it has ended.

        A large file may take longer than the timeout of collectives. The ranks therefore meet while files grow. If a
        file system hangs, they do not meet, and the watchdog finds the rank.
        """
        before = self._groups
        while not wait([self._task], PROGRESS_S).done and self._groups == before:
            pass
        self._checkpoints.on_wait()
        return self._task.done()

    def _progressed(self) -> None:
        self._groups += 1

    def _start(self, stage: SaveStage, work: Callable[[], object]) -> None:
        """Start the work of a stage. In all stages except VERIFY only rank 0 has work."""
        self._stage = stage
        if stage is SaveStage.VERIFY or self._checkpoints.world.rank == 0:
            self._task = in_daemon(work, f"checkpoint-{stage.name.lower()}")

    def _fail(self, error: BaseException | None) -> None:
        """End the save after an error. Raises the errors of all ranks, unless the checkpoint is already committed."""
        failure = joint_error(error, self._checkpoints.world, self._checkpoints.device)
        assert failure is not None
        stage = self._stage
        self._stage = SaveStage.OVER
        if stage > SaveStage.COMMIT and not isinstance(failure, Superseded):
            head = (
                f"the checkpoint of step {self._progress.step} is saved, but its stage {stage.name.lower()} failed: "
                "no older checkpoint is deleted"
            )
            log.info("\n".join([head, *map(str, failure.problems)]))
            return
        if self._checkpoints.world.rank == 0:
            shutil.rmtree(self._building, ignore_errors=True)
        raise failure

    @property
    def _building(self) -> Path:
        checkpoints = self._checkpoints
        return folder.temporary(checkpoints.directory, self._progress.step, checkpoints.facts.incarnation)

    # --- the work of the stages ---

    def _make_folder(self) -> None:
        """On rank 0, create the temporary folder that the ranks write into."""
        checkpoints = self._checkpoints
        checkpoints.check_lock()
        with folder.writing(checkpoints.directory, checkpoints.total_bytes):
            folder.begin(
                checkpoints.directory, self._progress.step, checkpoints.facts.incarnation, checkpoints.total_bytes
            )

    def _write(self) -> dict[str, Any] | None:
        """Write this rank's file. Return its name, size and digest, or None if the rank has nothing to save."""
        snapshot = self._checkpoints.snapshot
        if not snapshot.saved:
            return None
        if names := snapshot.not_finite():
            listing = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
            raise CheckpointError(
                f"weights are not finite: {listing}; the step is not saved",
                "continue from the newest checkpoint with a lower optimizer.lr; see decisions.jsonl",
                f"step {self._progress.step}",
            )
        path = self._building / snapshot.file
        head = snapshot.layout(self._progress.step).head
        data = snapshot.data()
        with folder.writing(path, self._checkpoints.total_bytes):
            digest = shard.write(path, head, data, self._progressed)
        return {"file": path.name, "bytes": len(head) + len(data), "sha256": digest}

    def _commit(self, files: Sequence[dict[str, Any] | None]) -> None:
        """On rank 0, turn the written shards into a complete checkpoint."""
        checkpoints = self._checkpoints
        manifest = build_manifest(self._progress, checkpoints.facts, checkpoints.contents, files)
        checkpoints.check_lock()
        with folder.writing(checkpoints.directory, checkpoints.total_bytes):
            folder.commit(checkpoints.directory, manifest, manifest.to_bytes(), manifest.incarnation)
        if checkpoints.uploads is not None:
            checkpoints.uploads.saved()

    def _verify(self) -> None:
        """Verify the checkpoints that will remain after old checkpoints are deleted. Each rank verifies the files that
        are assigned to it.

        Raises DamagedCheckpoint.
        """
        checkpoints = self._checkpoints
        steps = folder.named_steps(checkpoints.directory)
        if not checkpoints.expired(steps):
            return
        for step in steps[: checkpoints.keep]:
            path = checkpoints.directory / folder.step_name(step)
            manifest, _ = folder.read_manifest(path)
            for number, entry in enumerate(manifest.shards):
                reader = load.verifier(number, len(manifest.shards), checkpoints.world.size)
                if reader == checkpoints.world.rank:
                    shard.verify(path / entry.file, manifest, entry, lambda *block: self._progressed(), drop_cache=True)

    def _prune(self) -> None:
        """On rank 0, delete the expired checkpoints, except the best checkpoint and a checkpoint that is being
        uploaded.

        A failed deletion is only logged.
        """
        checkpoints = self._checkpoints
        best = folder.read_latest(checkpoints.directory, folder.BEST)
        for step in checkpoints.expired(folder.named_steps(checkpoints.directory)):
            name = folder.step_name(step)
            if name == best:
                continue
            checkpoints.check_lock()
            hit("checkpoint.before_delete")
            try:
                checkpoints.delete_unless_uploading(step)
            except OSError as error:
                log.warn(f"cannot delete {name}: {error.strerror}; it stays on disk")
