"""Manages the checkpoints of a run: saves them, deletes old ones, and loads one to continue the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

from frontier_llm import log
from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import drift, load
from frontier_llm.checkpoint.facts import JobFacts, checkpoints_folder, contents_of
from frontier_llm.checkpoint.lock import RunLock, Superseded
from frontier_llm.checkpoint.manifest import DamagedCheckpoint, Manifest, Progress, parse
from frontier_llm.checkpoint.older import position_of
from frontier_llm.checkpoint.ranks import from_rank_0, joint_error, transferred
from frontier_llm.checkpoint.remote import POLL_S, NotCopied, OnBytes, RemoteCheckpoint, RemoteTransfer, pull
from frontier_llm.checkpoint.save import Save, Saved
from frontier_llm.checkpoint.snapshot import Snapshot
from frontier_llm.checkpoint.upload import Uploads
from frontier_llm.comm import Mesh, all_gather_json
from frontier_llm.config import TrainConfig, expired_steps
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.errors import CheckpointError, FrontierError, Problem
from frontier_llm.failpoints import hit
from frontier_llm.optim import Optimizer
from frontier_llm.run.complete import fault
from frontier_llm.run.holder import this_process
from frontier_llm.units import format_bytes


class Checkpoints:
    """Saves and loads the checkpoints of one run.

    Public methods are collective over the world, except `check_lock` and `expired`. All ranks return the same result or
    raise the same error.
    """

    def __init__(
        self,
        train: TrainConfig,
        mesh: Mesh,
        optimizer: Optimizer,
        facts: JobFacts,
        allow_changes: Collection[str] = (),
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        """Take the run directory's lock and remove the files of an interrupted save.

        `allow_changes` are configuration keys that may differ from the checkpoint although they change the mathematics
        of the run. Every rank calls `on_wait` several times per second while rank 0 waits for `train.remote`, and
        repeatedly while it waits for files that grow or are read. Raises CheckpointError if another live job
        holds the lock, or if the directory cannot be written.
        """
        self.directory = checkpoints_folder(train)
        self.keep = train.keep_checkpoints
        # number of steps that training may run after the copy; then training waits for the commit
        self.lag_steps = max(1, train.save_interval // 10)
        if train.save_lag_steps is not None:
            self.lag_steps = train.save_lag_steps
        self.world = mesh.world
        self.device = optimizer.device
        self._optimizer = optimizer
        self._allow_changes = tuple(allow_changes)
        self.on_wait = on_wait
        self._lock: RunLock | None = None  # None except on rank 0
        self._train = train
        self.uploads: Uploads | None = None  # None except on rank 0 of a run with train.remote
        incarnation = from_rank_0(partial(self._open, facts), self.world, self.device)
        layout = degrees(mesh, optimizer)
        self.facts = replace(facts, layout=layout, optimizer=optimizer.rule.name, incarnation=incarnation)
        self.snapshot = Snapshot(optimizer, self.world.rank)
        mine = {"pieces": self.snapshot.pieces, "bytes": self.snapshot.layout(step=0).data_bytes}
        ranks = all_gather_json(mine, self.world, self.device)
        self.total_bytes = sum(rank["bytes"] for rank in ranks)
        pieces = [rank["pieces"] for rank in ranks] if self.world.rank == 0 else []
        self.contents = contents_of(pieces, self.snapshot.dtype)
        self.newest_step = -1  # step of the checkpoint that this process loaded or began to write last
        self.failures_in_row = 0
        self._save: Save | None = None

    def _open(self, facts: JobFacts) -> int:
        """On rank 0, take the lock and clean the directory. Return the number of this start of the run."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self.directory, this_process(facts.job, facts.restart), facts.incarnation)
            for path in folder.clean(self.directory):
                log.info(f"removed {path.name}, left by an interrupted save")
        except OSError as error:
            what = f"cannot be used: {error.strerror}"
            raise CheckpointError(what, "choose a train.run_dir that is writable", str(self.directory)) from error
        if self._train.remote is not None:
            self.uploads = Uploads(
                url=self._train.remote,
                run_dir=Path(self._train.run_dir),
                directory=self.directory,
                mib_per_s=self._train.remote_mib_per_s,
                kept=self._kept,
            )
        return self._lock.incarnation

    def check_lock(self) -> None:
        """On rank 0, check that this start of the run still holds the lock of the directory.

        Raises Superseded if a newer start holds the lock, and CheckpointError if the directory does not exist any more.
        """
        assert self._lock is not None, "only rank 0 writes"
        self._lock.check()

    def expired(self, steps: Sequence[int]) -> list[int]:
        """Return the steps whose checkpoints may be deleted. `steps` are sorted newest first."""
        return expired_steps(steps, self.keep, self._train.keep_every)

    def _kept(self) -> list[int]:
        """Return the steps whose checkpoints the next save does not delete, newest first."""
        steps = folder.named_steps(self.directory)
        best = folder.read_latest(self.directory, folder.BEST)
        expired = set(self.expired(steps))
        return [step for step in steps if step not in expired or folder.step_name(step) == best]

    def delete_unless_uploading(self, step: int) -> None:
        """On rank 0, delete a checkpoint, unless it is being uploaded. Raises OSError."""
        uploading = contextlib.nullcontext(True) if self.uploads is None else self.uploads.deleting(step)
        with uploading as may_delete:
            if may_delete:
                folder.delete_checkpoint(self.directory, step, self.facts.incarnation)

    # --- saving ---

    @property
    def under_way(self) -> Save | None:
        """The save in progress, or None."""
        if self._save is None or self._save.is_over:
            return None
        return self._save

    def begin(self, progress: Progress) -> Save:
        """Start to save: wait for a save in progress, copy the state, and start to write it. Returns after the copy.

        Raises CheckpointError if the save in progress failed, or if the new save cannot start.
        """
        self.finish()
        self._save = Save(self, progress)
        if self.uploads is not None:  # start them here too, because a caller that loads no checkpoint skips `newest`
            self.uploads.start()
        self.newest_step = progress.step
        return self._save

    def finish(self, verify: bool = True) -> Saved | None:
        """Wait for the save in progress, as `Save.finish` does."""
        return None if self._save is None else self._save.finish(verify)

    @contextlib.contextmanager
    def tolerating_one_failure(self) -> Iterator[None]:
        """Context for saves, in which the first failure is only logged, because older checkpoints are intact.

        Raises CheckpointError for the second failed save in a row, and Superseded always.
        """
        try:
            yield
        except CheckpointError as error:
            self.newest_step = -1
            self.failures_in_row += 1
            if self.failures_in_row > 1 or isinstance(error, Superseded):
                raise
            log.info(f"a save failed; training continues, and stops if the next save fails too\n{error}")

    def close(self, verify: bool = True, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Finish the save in progress as `finish` does, and release the run directory.

        With `verify` also wait for the uploads: at most `train.remote_wait_s`, and at most until the collective
        function `is_stopped` returns True. `verify` is False after an interruption, because the nodes may soon be lost.
        Uploads then continue in the next start.
        """
        try:
            self.finish(verify)
            if verify and self._train.remote is not None:
                self._wait_for_uploads(time.monotonic() + self._train.remote_wait_s, is_stopped)
        finally:
            try:
                if self.uploads is not None:
                    self.uploads.close()
            finally:
                if self._lock is not None:
                    self._lock.release()

    def _wait_for_uploads(self, until_s: float, is_stopped: Callable[[], bool]) -> None:
        """Wait until all uploads have ended, or until a deadline by rank 0's clock.

        No rank waits in one collective for long.
        """

        def must_wait() -> bool:
            assert self.uploads is not None
            if not self.uploads.is_running or not self.uploads.pending() or time.monotonic() > until_s:
                return False
            time.sleep(POLL_S)
            return True

        while from_rank_0(must_wait, self.world, self.device) and not is_stopped():
            self.on_wait()

    # --- loading ---

    def newest(self, strict: bool = False) -> Progress | None:
        """Load the newest intact checkpoint. Returns None if there is no checkpoint at all.

        If a checkpoint is damaged, the damaged files and tensors are logged, and the next older checkpoint is tried.
        With `strict` the damage is raised instead. Raises CheckpointError if no checkpoint is intact, or if the newest
        intact checkpoint does not fit the model or the configuration.
        """
        steps, latest = from_rank_0(
            lambda: [folder.named_steps(self.directory), folder.read_latest(self.directory)], self.world, self.device
        )
        damage: list[Problem] = []
        if latest and folder.step_of(self.directory / latest) not in steps:
            damage.append(Problem(str(self.directory / latest), f"does not exist, although {folder.LATEST} names it"))
            if strict:
                raise DamagedCheckpoint(damage)
            log.info(str(damage[0]))
        remote_steps = self._remote_steps(has_local=bool(steps))
        progress = self._load_first(steps, damage, strict, remote_steps)
        if self.uploads is not None:
            if progress is not None:
                self.uploads.continued_at(progress.step)
            self.uploads.start()
        if progress is None and damage:
            fix = "restore a checkpoint from a copy, or start a new run with another train.run_dir"
            raise CheckpointError([*damage, Problem(str(self.directory), "no checkpoint is intact", fix)])
        if progress is None:
            log.info(f"no checkpoint in {self.directory}: starting from step 0")
            return None
        from_rank_0(partial(self._point_at, progress), self.world, self.device)
        self.newest_step = progress.step
        log.info(f"resuming after step {progress.step} ({progress.tokens:,} tokens)")
        return progress

    def newest_at_most(self, step: int) -> int | None:
        """Return the step of the newest checkpoint of at most step `step`. Waits for a save in progress."""
        return next(iter(self._at_most(step)), None)

    def rewind(self, before: int) -> Progress | None:
        """Load the newest intact checkpoint of at most step `before`, and delete all newer checkpoints.

        Returns None, and changes nothing, if there is no such checkpoint.
        """
        progress = self._load_first(self._at_most(before), [])
        if progress is not None:
            from_rank_0(partial(self._delete_newer, progress), self.world, self.device)
            self.newest_step = -1  # so that the next save writes this step again: its data position may then differ
        return progress

    def load(self, path: Path) -> Progress:
        """Fill optimizer state and weights from a checkpoint of any layout, and check the digest of every file.

        Raises DamagedCheckpoint for damaged files, and CheckpointError for another model or configuration. After an
        error the state may be partly filled, and training must not continue with it.
        """
        text = from_rank_0(partial(self._admit, path), self.world, self.device)
        manifest = parse(text.encode(), str(path / folder.MANIFEST))
        self._read(path, manifest)
        self._optimizer.weights_from_masters()
        hit("checkpoint.loaded")
        position = position_of(manifest, self.facts.datasets)
        updates = manifest.progress.optimizer_updates
        if manifest.optimizer != self.facts.optimizer:
            log.info(
                f"only the weights are loaded from {path.name}: the optimizer is {self.facts.optimizer}, and the saved "
                f"optimizer state is of {manifest.optimizer}"
            )
            updates = 0
        self._optimizer.updates = updates
        update = {"position": position, "optimizer_updates": updates, **load.loss_scale(manifest, self.facts.config)}
        return manifest.progress.model_copy(update=update)

    def _load_first(
        self, steps: Sequence[int], damage: list[Problem], strict: bool = False, remote_steps: Sequence[int] = ()
    ) -> Progress | None:
        """Load the intact checkpoint of the highest step, local before remote.

        Damage is added to `damage`, or raised with `strict`. Returns None if no checkpoint is intact. If a remote
        checkpoint cannot be copied, only local checkpoints are tried after it. If none of these is intact, NotCopied is
        raised. With `strict`, NotCopied is raised as soon as a copy fails.
        """
        candidates = [(step, False) for step in steps] + [(step, True) for step in remote_steps]
        copy_problems: list[Problem] = []
        for step, is_remote in sorted(candidates, key=lambda candidate: (-candidate[0], candidate[1])):
            if is_remote and copy_problems:
                continue
            path = self.directory / folder.step_name(step)
            try:
                if is_remote:
                    copy_problems = self._copy(step)
                if is_remote and copy_problems:
                    if strict:
                        break
                    head = f"{path.name} cannot be copied from {self._train.remote}; trying the local checkpoints"
                    log.warn("\n".join([head, *map(str, copy_problems)]))
                    continue
                return self.load(path)
            except DamagedCheckpoint as error:
                if strict:
                    raise
                damage.extend(error.problems)
                log.info(
                    "\n".join([f"{path.name} is damaged; loading the checkpoint before it", *map(str, error.problems)])
                )
        if copy_problems:
            raise NotCopied([*damage, *copy_problems])
        return None

    def _remote_steps(self, has_local: bool) -> list[int]:
        """Claim `train.remote` and return the steps whose checkpoints are complete at this URL. Collective.

        If the store cannot be reached, a run with local checkpoints continues from its local checkpoints. Raises
        CheckpointError if another run directory writes to the URL, or if the store cannot be reached and there is no
        local checkpoint.
        """
        if self._train.remote is None:
            return []

        def without_store(error: Exception) -> list[int]:
            if not has_local:
                raise error
            log.warn(f"continuing from the local checkpoints, because train.remote cannot be reached\n{error}")
            return []

        steps: list[int] = self._transferred(lambda _: self.uploads and self.uploads.claim(), without_store)
        return steps

    def _copy(self, step: int) -> list[Problem]:
        """Copy a remote checkpoint into the run directory. Collective. Returns the reason if the copy is not possible
        now.

        Raises NotCopied if another run directory has uploaded the checkpoint: without this checkpoint, the run would
        have two histories. If this run directory has uploaded it, the run can repeat the steps.
        """

        def not_now(error: FrontierError) -> list[tuple[str, str, str]]:
            if self.uploads is not None and not self.uploads.is_own(step):
                raise NotCopied(error.problems)
            return [astuple(problem) for problem in error.problems]

        return [Problem(*problem) for problem in self._transferred(partial(self._pull, step), not_now) or ()]

    def _pull(self, step: int, on_bytes: OnBytes) -> None:
        """On rank 0, copy a remote checkpoint into the run directory. Changes of the configuration since the checkpoint
        are checked before the copy.

        Raises DamagedCheckpoint, CheckpointError for a change that is not allowed, and UnreachableError or CannotWrite
        if the copy is not possible now, for example because of a full disk.
        """
        assert self.uploads is not None
        source = RemoteCheckpoint(RemoteFolder(self.uploads.url), step)
        manifest, _ = source.read_manifest()
        drift.allowed_changes(manifest, self.facts, self._allow_changes, str(source))
        self.check_lock()
        log.info(f"copying {source}, {format_bytes(manifest.total_bytes)}")
        pull(source, self.directory, on_bytes, before_commit=self.check_lock)

    def _transferred(self, work: Callable[[OnBytes], Any], if_not_possible: Callable[[FrontierError], Any]) -> Any:
        """Return the result of `ranks.transferred` for `train.remote`. Collective."""
        start = partial(RemoteTransfer, work, str(self._train.remote))
        return transferred(start, if_not_possible, self.on_wait, self.world, self.device)

    def _at_most(self, step: int) -> list[int]:
        """Wait for a save in progress. Return the steps of all checkpoints of at most step `step`, newest first."""
        self.finish()
        steps: list[int] = from_rank_0(lambda: folder.named_steps(self.directory), self.world, self.device)
        return [older for older in steps if older <= step]

    def _admit(self, path: Path) -> str:
        """On rank 0, return the text of a checkpoint's manifest. Other ranks receive the text from rank 0.

        Raises DamagedCheckpoint if the checkpoint is not complete, and CheckpointError for changes that are not
        allowed.
        """
        if (problem := fault(path)) is not None:
            raise DamagedCheckpoint(problem)
        manifest, content = folder.read_manifest(path)
        self._report_drift(manifest, str(path))
        return content.decode()

    def _read(self, path: Path, manifest: Manifest) -> None:
        """Read this rank's part of the state. Raises one error with the problems of all ranks."""
        error: CheckpointError | None = None
        try:
            problems = load.read_shards(path, manifest, self._optimizer, self.world.rank, self.world.size, self.on_wait)
            if problems:
                error = DamagedCheckpoint(problems)
        except CheckpointError as caught:
            error = caught
        failure = joint_error(error, self.world, self.device)
        if failure is not None:
            raise failure

    def _report_drift(self, manifest: Manifest, where: str) -> None:
        """On rank 0, log the changes since the checkpoint. Raises CheckpointError for a change that is not allowed."""
        changes = drift.allowed_changes(manifest, self.facts, self._allow_changes, where)
        if manifest.environment:  # imported weights have no environment
            changes += drift.environment_changes(manifest.environment, self.facts.environment)
        for change in changes:
            log.info(f"differs from the checkpoint: {change}")
        if manifest.progress.position is None and manifest.progress.step:
            log.info(
                f"{where} has format version {manifest.version}: the position in each dataset is computed from the "
                f"step. "
                "Data that earlier changes of batch, weights or data skipped or read twice is not recorded"
            )

    def _delete_newer(self, progress: Progress) -> None:
        """On rank 0, delete all checkpoints that are newer than `progress`, also at `train.remote`."""
        self._point_at(progress)
        if self.uploads is not None:
            self.uploads.discard(progress.step)
        for newer in folder.named_steps(self.directory):
            if newer > progress.step:
                self.check_lock()
                folder.withdraw_checkpoint(self.directory, newer, self.facts.incarnation)

    def _point_at(self, progress: Progress) -> None:
        """On rank 0, make LATEST name the loaded checkpoint, and also BEST if it is the best checkpoint.

        Until this call, LATEST can name a newer checkpoint that is damaged. After a crash before the update of LATEST,
        it can name an older checkpoint.
        """
        name = folder.step_name(progress.step)
        if folder.read_latest(self.directory) != name:
            self.check_lock()
            folder.point_latest(self.directory, name)
        if progress.is_best and folder.read_latest(self.directory, folder.BEST) != name:
            self.check_lock()
            folder.point_best(self.directory, name)


def degrees(mesh: Mesh, optimizer: Optimizer) -> dict[str, int]:
    """Return the parallel degrees of the layout, in the form that a manifest records."""
    layout = {"tp": mesh.tp.size, "cp": mesh.cp.size, "pp": mesh.pp.size, "dp": mesh.dp.size}
    layout["zero"] = int(optimizer.shards > 1)
    if mesh.ep.size > 1:
        layout["ep"] = mesh.ep.size
    return layout
