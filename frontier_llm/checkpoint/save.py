"""Writing: the stages of one save (see `manager`), each rank's part of a stage in a thread, each transition agreed
by all ranks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from frontier_llm import log
from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import load, shard
from frontier_llm.checkpoint.lock import RunLock, Superseded
from frontier_llm.checkpoint.manifest import (
    FORMAT,
    VERSION,
    DtypeName,
    Manifest,
    Progress,
    SavedPiece,
    Shard,
    TensorEntry,
    config_digest,
)
from frontier_llm.checkpoint.shard import BLOCK_BYTES
from frontier_llm.checkpoint.snapshot import Snapshot
from frontier_llm.comm import Mesh, all_gather_json, maximum
from frontier_llm.config.plugins import PluginRecord
from frontier_llm.errors import CheckpointError, FrontierError, Problem
from frontier_llm.failpoints import hit
from frontier_llm.optim import Optimizer
from frontier_llm.run.threads import in_daemon
from frontier_llm.units import format_bytes

STAGES = ("write", "commit", "audit", "prune")


class Writer:
    """What all saves of a run share: who writes what, where to, and what is kept."""

    def __init__(
        self,
        directory: Path,
        mesh: Mesh,
        optimizer: Optimizer,
        *,
        config: Mapping[str, Any],
        environment: Mapping[str, str],
        data: Mapping[str, str],
        plugins: Sequence[PluginRecord] = (),
        incarnation: int,
        keep: int,
        keep_every: int,
        lock: RunLock | None,
    ) -> None:
        """Collective: rank 0 learns once which rectangles each rank writes."""
        self.directory = directory
        self.mesh = mesh
        self.device = optimizer.device
        self.lock = lock
        self.incarnation = incarnation
        self.keep = keep
        self.keep_every = keep_every
        self.snapshot = Snapshot(optimizer, mesh.world.rank)
        layout = {
            "tp": mesh.tp.size,
            "cp": mesh.cp.size,
            "pp": mesh.pp.size,
            "dp": mesh.dp.size,
            "zero": int(optimizer.shards > 1),
        }
        layout |= {"ep": mesh.ep.size} if mesh.ep.size > 1 else {}
        mine = {"pieces": self.snapshot.pieces, "bytes": self.snapshot.layout(step=0).data_bytes}
        ranks = all_gather_json(mine, mesh.world, self.device)
        self.total_bytes = sum(rank["bytes"] for rank in ranks)
        self._manifest = partial(
            build_manifest,
            incarnation=incarnation,
            layout=layout,
            config=config,
            environment=environment,
            data=data,
            plugins=plugins,
            dtype=self.snapshot.dtype,
            optimizer=optimizer.rule.name,
            pieces=[[SavedPiece(name, *map(tuple, rest)) for name, *rest in rank["pieces"]] for rank in ranks]
            if mesh.world.rank == 0
            else [],
        )

    def prepare(self, step: int) -> None:
        """Rank 0: make the folder that the ranks write into. Raises CheckpointError when it cannot be, or the space
        does not suffice.
        """
        assert self.lock is not None
        self.lock.check()
        with writing(self.directory, self.total_bytes):
            building = folder.begin(self.directory, step, self.incarnation)
            free = os.statvfs(self.directory)
            if free.f_bavail * free.f_frsize < self.total_bytes:
                building.rmdir()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def start(self, progress: Progress) -> Save:
        """Copy the state and begin to write."""
        self.snapshot.take()
        hit("checkpoint.copied")
        return Save(self, progress)

    def write_shard(self, step: int) -> dict[str, Any] | None:
        """This rank's file; None when it has nothing that counts."""
        if not self.snapshot.saved:
            return None
        if names := self.snapshot.not_finite():
            what = (
                f"weights are not finite: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}; the step is not saved"
            )
            raise CheckpointError(
                what, "go on from the newest checkpoint with a lower optimizer.lr; see decisions.jsonl", f"step {step}"
            )
        path = folder.temporary(self.directory, step, self.incarnation) / self.snapshot.file
        head = self.snapshot.layout(step).head
        data = self.snapshot.data()
        with writing(path, self.total_bytes):
            return {"sha256": shard.write(path, head, data), "file": path.name, "bytes": len(head) + len(data)}

    def commit(self, progress: Progress, parts: Sequence[dict[str, Any] | None]) -> Path:
        """Rank 0: make the written shards a checkpoint."""
        assert self.lock is not None
        manifest = self._manifest(progress, parts=parts)
        self.lock.check()
        with writing(self.directory, self.total_bytes):
            return folder.commit(self.directory, manifest)

    def audit(self) -> None:
        """Read back this rank's share of the newest `keep` checkpoints. Raises DamagedCheckpoint."""
        steps = folder.named_steps(self.directory)
        if not self._doomed(steps):
            return
        for step in steps[: self.keep]:
            path = self.directory / folder.step_name(step)
            manifest = folder.read_manifest(path)[0]
            for number, entry in enumerate(manifest.shards):
                if load.verifier(number, len(manifest.shards), self.mesh.world.size) == self.mesh.world.rank:
                    shard.verify(path / entry.file, manifest, entry, drop_cache=True)

    def prune(self) -> None:
        """Rank 0: delete what is older than the newest `keep`, except permanent checkpoints and the best one; a
        delete that fails is a warning.
        """
        assert self.lock is not None
        best = folder.read_latest(self.directory, folder.BEST)
        for step in self._doomed(folder.named_steps(self.directory)):
            if folder.step_name(step) == best:
                continue
            self.lock.check()
            hit("checkpoint.before_delete")
            try:
                folder.delete_checkpoint(self.directory, step, self.incarnation)
            except OSError as error:
                log.warn(f"cannot delete {folder.step_name(step)}: {error.strerror}; it stays")

    def _doomed(self, steps: Sequence[int]) -> list[int]:
        return [step for step in steps[self.keep :] if not (self.keep_every and step % self.keep_every == 0)]

    def abandon(self, step: int) -> None:
        """Rank 0: remove what a failed save has written."""
        if self.lock is not None:
            shutil.rmtree(folder.temporary(self.directory, step, self.incarnation), ignore_errors=True)


class Save:
    """One save under way."""

    def __init__(self, writer: Writer, progress: Progress) -> None:
        self._writer = writer
        self._progress = progress
        self._stage = 0
        self._task: Future[Any] = in_daemon(lambda: writer.write_shard(progress.step), "checkpoint-write")

    @property
    def committed(self) -> bool:
        """LATEST has moved."""
        return self._stage > STAGES.index("commit")

    @property
    def finished(self) -> bool:
        """Nothing is left to do."""
        return self._stage == len(STAGES)

    def advance(self, block: bool) -> Path | None:
        """Go on to the next stage if all ranks have finished this one. Collective. Returns the path when this was the
        commit.

        Raises CheckpointError with the problems of all ranks when any failed before LATEST moved; later ones are only
        warnings.
        """
        writer = self._writer
        done = bool(wait([self._task], None if block else 0).done)
        unfinished, failed = maximum(
            [int(not done), int(done and bool(self._task.exception()))], writer.mesh.world, writer.device
        )
        if unfinished:
            return None
        if failed:
            self._fail()
            return None
        stage = STAGES[self._stage]
        parts = all_gather_json(self._task.result(), writer.mesh.world, writer.device) if stage == "write" else []
        self._stage += 1
        if not self.finished:
            self._begin(parts)
        return writer.directory / folder.step_name(self._progress.step) if stage == "commit" else None

    def _begin(self, parts: Sequence[dict[str, Any] | None]) -> None:
        writer = self._writer
        stage = STAGES[self._stage]
        work: dict[str, Callable[[], Any]] = {
            "commit": lambda: writer.commit(self._progress, parts),
            "audit": writer.audit,
            "prune": writer.prune,
        }
        if stage == "audit" or writer.mesh.world.rank == 0:
            # the others have the stage before, which is finished
            self._task = in_daemon(work[stage], f"checkpoint-{stage}")

    def _fail(self) -> None:
        writer = self._writer
        stage = STAGES[self._stage]
        error = self._task.exception()
        problems = (
            error.problems
            if isinstance(error, FrontierError)
            else [Problem("checkpoint", f"{type(error).__name__}: {error}")]
        )
        mine = {
            "problems": [vars(problem) for problem in problems[:5] if error],
            "superseded": isinstance(error, Superseded),
        }
        answers = all_gather_json(mine, writer.mesh.world, writer.device)
        problems = list(dict.fromkeys(Problem(**row) for answer in answers for row in answer["problems"]))
        superseded = any(answer["superseded"] for answer in answers)
        if self.committed and not superseded:
            log.info("\n".join([f"{stage} after step {self._progress.step}: nothing is deleted", *map(str, problems)]))
            self._stage = len(STAGES)
            return
        writer.abandon(self._progress.step)
        raise (Superseded if superseded else CheckpointError)(problems)


def build_manifest(
    progress: Progress,
    *,
    incarnation: int,
    layout: Mapping[str, int],
    config: Mapping[str, Any],
    environment: Mapping[str, str],
    data: Mapping[str, str],
    plugins: Sequence[PluginRecord] = (),
    dtype: DtypeName,
    optimizer: str,
    pieces: Sequence[Sequence[SavedPiece]],
    parts: Sequence[dict[str, Any] | None],
) -> Manifest:
    """The manifest of files that hold these pieces each; of `parts` (name, size, digest) those are None that were
    not written.
    """
    tensors = {piece.name: piece for held in pieces for piece in held}
    numbers = {name: number for number, name in enumerate(tensors)}
    kinds = tuple(dict.fromkeys(kind for tensor in tensors.values() for kind in tensor.kinds))
    rows = [tuple((numbers[piece.name], piece.offset, piece.shape) for piece in held) for held in pieces]
    return Manifest(
        format=FORMAT,
        version=VERSION,
        block_bytes=BLOCK_BYTES,
        incarnation=incarnation,
        progress=progress,
        layout=dict(layout),
        config=dict(config),
        config_sha256=config_digest(config),
        environment=dict(environment),
        plugins=tuple(plugins),
        data=dict(data),
        dtype=dtype,
        optimizer=optimizer,
        kinds=kinds,
        tensors=tuple(
            TensorEntry(name=name, shape=tensor.global_shape, kinds=() if tensor.kinds == kinds else tensor.kinds)
            for name, tensor in tensors.items()
        ),
        shards=tuple(Shard(**part, pieces=held) for part, held in zip(parts, rows, strict=True) if part is not None),
    )


@contextlib.contextmanager
def writing(where: Path, needed_bytes: int) -> Iterator[None]:
    """An OSError inside becomes what the user is told: the cause, and for a full disk how much is needed and free,
    in bytes and files.
    """
    try:
        yield
    except OSError as error:
        where = Path(error.filename or where)
        what = f"cannot write the checkpoint: {error.strerror or error}"
        fix = "check the file system; the checkpoints before this one are untouched"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            existing = next(path for path in (where, *where.parents) if path.exists())
            free = os.statvfs(existing)
            room = f"{format_bytes(free.f_bavail * free.f_frsize)} and {free.f_favail} files are free"
            what += f"; needs {format_bytes(needed_bytes)}, {room}"
            fix = (
                "free space or raise the quota or ulimit -f; lower train.keep_checkpoints; the checkpoints before "
                "this one are untouched"
            )
        raise CheckpointError(what, fix, str(where)) from error
