"""CheckpointManager: what the training loop calls.

A save goes through four stages, each collective decision taken at a step boundary by `poll`:

    write    every rank: its shard, in a thread, from a copy of the state
    commit   rank 0, in a thread: manifest, rename, LATEST
    audit    every rank, in a thread: read back its share of the newest `keep` checkpoints and compare digests
    prune    rank 0, in a thread: delete what is older, only when the audit found nothing

so training waits for the copy alone, no collective ever runs in a thread, and all ranks learn of a failure at the same
step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from frontier_llm import log
from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import drift, load
from frontier_llm.checkpoint.lock import RunLock, Superseded
from frontier_llm.checkpoint.manifest import DamagedCheckpoint, Manifest, Progress, parse
from frontier_llm.checkpoint.older import position_of
from frontier_llm.checkpoint.save import Save, Writer
from frontier_llm.comm import Mesh, all_gather_json, broadcast_bytes, broadcast_json
from frontier_llm.config import RunConfig
from frontier_llm.config.plugins import PluginRecord
from frontier_llm.data.identity import Dataset, identities
from frontier_llm.errors import CheckpointError, FrontierError, Problem
from frontier_llm.failpoints import hit
from frontier_llm.optim import Optimizer
from frontier_llm.run.complete import fault
from frontier_llm.run.holder import Holder, this_process

_ERRORS = {error.__name__: error for error in (DamagedCheckpoint, Superseded)}  # kinds that callers tell apart


class CheckpointManager:
    """Saves and loads one run's state. Every public method is collective over mesh.world and returns or raises alike
    on all ranks.
    """

    def __init__(
        self,
        directory: Path,
        mesh: Mesh,
        optimizer: Optimizer,
        *,
        config: RunConfig,
        keep: int,
        keep_every: int = 0,
        environment: Mapping[str, str] | None = None,
        plugins: Sequence[PluginRecord] = (),
        datasets: Mapping[str, Dataset] | None = None,
        job: str = "",
        restart: int = 0,
        incarnation: int = 0,
        allow_changes: Collection[str] = (),
    ) -> None:
        """Take the run directory's lock and clear what an interrupted save has left.

        keep: newest checkpoints that stay, ≥ 2; keep_every: checkpoints at its multiples stay for good (0 = none).
        environment: versions, code commit, device, of rank 0 alone; shown when it differs on resume. datasets: by path
        those that are trained on; refused when their tokens differ. job, restart: the scheduler's identity of this job
        and how often it was requeued, so that a requeued job takes its own lock over at once. incarnation: the
        supervisor's count of starts, 0 = none. plugins: those that this process has imported, of rank 0 alone; refused
        when they differ. allow_changes: configuration keys that may differ from the checkpoint's although they change
        the mathematics. Raises CheckpointError when another live job holds the directory or it cannot be written.
        """
        assert keep >= 2, f"keep {keep}: with one, the only checkpoint could be the damaged one"
        self.directory = directory
        self._mesh = mesh
        self._optimizer = optimizer
        self._config = config.model_dump(mode="json")
        self._plugins = tuple(plugins)
        self._environment = dict(environment or {})
        self._data = identities(datasets or {})
        self._allow_changes = tuple(allow_changes)
        self._datasets = dict(datasets or {})
        self._device = optimizer.device
        self._lock: RunLock | None = None
        self.incarnation = int(self._from_rank_0(lambda: self._open(this_process(job, restart), incarnation)))
        self._writer = Writer(
            directory,
            mesh,
            optimizer,
            config=self._config,
            environment=self._environment,
            data=self._data,
            plugins=self._plugins,
            incarnation=self.incarnation,
            keep=keep,
            keep_every=keep_every,
            lock=self._lock,
        )
        self._save: Save | None = None

    def _open(self, holder: Holder, incarnation: int) -> int:
        """Rank 0: lock and clean."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self.directory, holder, incarnation)
            for path in folder.clean(self.directory):
                log.info(f"removed {path.name}, left by an interrupted save")
        except OSError as error:
            raise CheckpointError(
                f"cannot be used: {error.strerror}", "choose a train.run_dir that is writable", str(self.directory)
            ) from error
        return self._lock.incarnation

    def _from_rank_0(self, compute: Callable[[], Any]) -> Any:
        """The result of rank 0's `compute()` on every rank, or its FrontierError. Collective."""
        answer: dict[str, Any] = {}
        if self._mesh.world.rank == 0:
            try:
                answer = {"value": compute()}
            except OSError as error:
                answer = {
                    "problems": [vars(Problem(str(error.filename or self.directory), str(error.strerror)))],
                    "kind": "",
                }
            except FrontierError as error:
                answer = {"problems": [vars(problem) for problem in error.problems], "kind": type(error).__name__}
        answer = broadcast_json(answer, self._mesh.world, self._device)
        if "problems" in answer:
            raise _ERRORS.get(answer["kind"], CheckpointError)(Problem(**problem) for problem in answer["problems"])
        return answer["value"]

    # --- saving ---

    def start_save(self, progress: Progress) -> None:
        """Copy the state and begin to write it; returns after the copy. Waits first for a save that is still under way.

        Raises CheckpointError when that one failed, or this one cannot begin (no space, replaced by a newer
        incarnation).
        """
        self.wait()
        self._from_rank_0(lambda: self._writer.prepare(progress.step))
        self._save = self._writer.start(progress)

    def poll(self) -> Path | None:
        """To be called at every step boundary: moves a save that is under way to its next stage when all ranks are
        ready.

        Returns the checkpoint's path in the call in which LATEST has moved to it. Raises CheckpointError, on all ranks,
        when any rank failed; the save is then abandoned and its files are removed, older checkpoints are untouched.
        """
        return self._advance(block=False)

    def wait(self, audit: bool = True) -> Path | None:
        """Finish the save that is under way: to the end, or with `audit=False` only until LATEST has moved."""
        committed: Path | None = None
        while self._save is not None and (audit or not self._save.committed):
            committed = self._advance(block=True) or committed
        return committed

    def _advance(self, block: bool) -> Path | None:
        """One more stage of the save under way, if there is one; forget it when it is finished or has failed."""
        if self._save is None:
            return None
        save = self._save
        self._save = None
        committed = save.advance(block)
        self._save = None if save.finished else save
        return committed

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint and return its path when LATEST points at it. The audit and the pruning go on in the
        background.
        """
        self.start_save(progress)
        self.wait(audit=False)
        return self.directory / folder.step_name(progress.step)

    @property
    def saving(self) -> bool:
        """True while a save is under way."""
        return self._save is not None

    # --- loading ---

    def load_latest(self, strict: bool = False) -> Progress | None:
        """Continue from the newest intact checkpoint; None when there is none at all.

        Damage is reported by file and tensor and the next older checkpoint is tried; with `strict` it is raised
        instead. Raises CheckpointError when no checkpoint is intact, or the newest intact one does not fit the model or
        the configuration.
        """
        steps, latest = self._from_rank_0(
            lambda: [folder.named_steps(self.directory), folder.read_latest(self.directory)]
        )
        damage: list[Problem] = []
        if latest and folder.step_of(self.directory / latest) not in steps:
            damage.append(Problem(str(self.directory / latest), f"is not there, though {folder.LATEST} names it"))
            if strict:
                raise DamagedCheckpoint(damage)
            log.info(str(damage[0]))
        progress = self._load_first(steps, damage, strict)
        if progress is not None:
            self._from_rank_0(partial(self._note_latest, folder.step_name(progress.step)))
            return progress
        if damage:
            fix = "restore one from a copy, or start anew with another train.run_dir"
            raise CheckpointError([*damage, Problem(str(self.directory), "no checkpoint is intact", fix)])
        return None

    def _load_first(self, steps: Sequence[int], damage: list[Problem], strict: bool = False) -> Progress | None:
        """Load the first of these checkpoints that is intact; what is damaged before it goes to `damage`, or with
        `strict` is raised.
        """
        for step in steps:
            path = self.directory / folder.step_name(step)
            try:
                self._refuse_incomplete(path)
                return self.load(path)
            except DamagedCheckpoint as error:
                if strict:
                    raise
                damage.extend(error.problems)
                log.info("\n".join([f"{path.name} is damaged; trying the one before it", *map(str, error.problems)]))
        return None

    def _refuse_incomplete(self, path: Path) -> None:
        """Rank 0: raise DamagedCheckpoint for what the supervisor and `status` do not take for a complete checkpoint
        either.
        """

        def check() -> None:
            if (problem := fault(path)) is not None:
                raise DamagedCheckpoint(problem)

        self._from_rank_0(check)

    def _at_most(self, step: int) -> list[int]:
        """Steps of the complete checkpoints that are not above `step`, newest first, when nothing is under way any
        more.
        """
        self.wait()
        steps: list[int] = self._from_rank_0(lambda: [old for old in folder.named_steps(self.directory) if old <= step])
        return steps

    def newest_at_most(self, step: int) -> int | None:
        """The newest complete checkpoint's step that is not above `step`, when nothing is under way any more."""
        return next(iter(self._at_most(step)), None)

    def rewind(self, before: int) -> Progress | None:
        """Load the newest intact checkpoint of at most step `before` and delete the newer ones, which belong to an
        abandoned course.

        None, and nothing is changed, when there is no such checkpoint.
        """
        progress = self._load_first(self._at_most(before), [])
        if progress is not None:
            self._from_rank_0(partial(self._delete_newer, progress.step))
        return progress

    def _delete_newer(self, step: int) -> None:
        self._note_latest(folder.step_name(step))
        for newer in folder.named_steps(self.directory):
            if newer > step and self._lock is not None:
                self._lock.check()
                folder.delete_checkpoint(self.directory, newer, self.incarnation)

    def _note_latest(self, loaded: str) -> None:
        """Rank 0: LATEST names what the run continues from, also after damage or a crash between rename and LATEST."""
        if self._lock is not None and folder.read_latest(self.directory) != loaded:
            self._lock.check()
            folder.point_latest(self.directory, loaded)

    def load(self, path: Path) -> Progress:
        """Fill optimizer state and weights from one checkpoint, whatever layout wrote it, checking every file's digest.

        Raises DamagedCheckpoint (bytes are not what was written) or CheckpointError (another model or configuration);
        after either the state must not be trained on.
        """
        manifest = self._shared_manifest(path)
        self._from_rank_0(partial(self._report_drift, manifest, str(path)))
        problems, damaged = self._read(path, manifest)
        if problems:
            raise (DamagedCheckpoint if damaged else CheckpointError)(problems)
        self._optimizer.weights_from_masters()
        hit("checkpoint.loaded")
        position = position_of(manifest, self._datasets)
        progress = manifest.progress.model_copy(update={"position": position})
        if manifest.optimizer != self._optimizer.rule.name:
            log.info(
                f"only the weights are taken from {path.name}: {self._optimizer.rule.name} has no use for what "
                f"{manifest.optimizer} keeps"
            )
            progress = progress.model_copy(update={"optimizer_updates": 0})
        self._optimizer.updates = progress.optimizer_updates
        return progress

    def _shared_manifest(self, path: Path) -> Manifest:
        """Rank 0 reads and checks it; the others get its bytes, so that thousands of ranks do not open one file."""
        content = b""

        def read() -> None:
            nonlocal content
            content = folder.read_manifest(path)[1]

        self._from_rank_0(read)
        return parse(broadcast_bytes(content, self._mesh.world, self._device), str(path / folder.MANIFEST))

    def _read(self, path: Path, manifest: Manifest) -> tuple[list[Problem], bool]:
        """(every rank's problems without repeats, True when they are damage)."""
        world = self._mesh.world
        mine = list[Problem]()
        damaged = True
        try:
            mine = load.read_shards(path, manifest, self._optimizer, world.rank, world.size)
        except CheckpointError as error:
            mine = list(error.problems)
            damaged = isinstance(error, DamagedCheckpoint)
        gathered = all_gather_json(
            {"problems": [vars(problem) for problem in mine[:10]], "damaged": damaged}, world, self._device
        )
        problems = dict.fromkeys(Problem(**problem) for answer in gathered for problem in answer["problems"])
        return list(problems), all(answer["damaged"] for answer in gathered)

    def _report_drift(self, manifest: Manifest, where: str) -> None:
        """Rank 0: say what has changed since, or refuse it."""
        changes = drift.allowed_changes(manifest, self._config, self._data, self._plugins, self._allow_changes, where)
        # else imported
        elsewhere = drift.environment_changes(manifest.environment, self._environment) if manifest.environment else []
        for change in [*changes, *elsewhere]:
            log.info(f"differs from the checkpoint: {change}")
        if manifest.progress.position is None and manifest.progress.step:
            what = "what earlier changes of batch, weights or data skipped or read twice is not recorded"
            log.info(
                f"{where} has version {manifest.version}: how much of each dataset it has read follows from its "
                f"step; {what}"
            )

    def close(self, audit: bool = True) -> None:
        """Finish what is under way and give the run directory up. With `audit=False` only until LATEST has moved."""
        try:
            self.wait(audit)
        finally:
            if self._lock is not None:
                self._lock.release()
