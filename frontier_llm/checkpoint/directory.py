"""The folder `checkpoints/` of a run: names of checkpoints, their commit by a rename, and the files LATEST and BEST.

Only rank 0 changes the folder, except that every rank writes its own shard. A folder `step_00000100/` is always a
complete checkpoint. It gets this name by one rename, after all its bytes have been flushed to the device.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from frontier_llm import log
from frontier_llm.checkpoint.manifest import DamagedCheckpoint, Manifest, parse
from frontier_llm.errors import CheckpointError
from frontier_llm.failpoints import hit
from frontier_llm.files import sync_directory, write_atomically, write_durably
from frontier_llm.run.complete import (
    MANIFEST,
    MANIFEST_DIGEST,
    BrokenManifest,
    digest_line,
    manifest_bytes,
    named_step,
    named_steps,
    step_name,
)
from frontier_llm.units import format_bytes

LATEST = "LATEST"
BEST = "BEST"
_REPLACED = re.compile(r"(step_[0-9]{8,12})\.replaced\.[0-9]+")
_LEFTOVER = re.compile(r"step_[0-9]{8,12}\.(tmp|deleted)\.[0-9]+|\.(LATEST|BEST)\.[0-9a-f]{32}")


class CannotWrite(CheckpointError):
    """The file system does not accept a checkpoint: the disk is full, or a file cannot be created."""


class DeletedCheckpoint(CheckpointError):
    """A checkpoint does not exist any more, because its run deleted it while a command was reading it."""


@contextlib.contextmanager
def unless_deleted(path: Path) -> Iterator[None]:
    """Context for reading a checkpoint of a run that may be training. Raises DeletedCheckpoint in place of an error if
    the checkpoint does not exist any more.
    """
    try:
        yield
    except (DamagedCheckpoint, OSError) as error:
        if path.exists():
            raise
        raise DeletedCheckpoint("was deleted while it was read", where=str(path)) from error


def step_of(path: Path) -> int:
    """Return the step in the folder name of a complete checkpoint. Raises CheckpointError for any other name."""
    step = named_step(path.name)
    if step is None:
        raise CheckpointError(
            "is not the name of a checkpoint", fix="give a folder such as checkpoints/step_00000100", where=str(path)
        )
    return step


def checkpoints_at(path: Path) -> list[Path]:
    """Return the complete checkpoints at a path, newest first.

    The path is a run directory, its `checkpoints` folder or one checkpoint.
    """
    if (path / MANIFEST).exists() or re.match(r"step_\d", path.name):
        step_of(path)
        return [path]
    places = (path / "checkpoints", path)
    return next(filter(None, ([place / step_name(step) for step in named_steps(place)] for place in places)), [])


def is_there(directory: Path) -> bool:
    """Return True if this rank's file system shows a checkpoint from which the run would continue."""
    return bool(named_steps(directory))


def leftovers(directory: Path) -> list[Path]:
    """Return the files and folders that remain from interrupted saves and deletions."""
    return sorted(
        path for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    )


def clean(directory: Path) -> list[Path]:
    """Remove the files and folders that remain from interrupted saves and deletions.

    Restore a checkpoint whose replacement was interrupted.

    Returns the removed paths. A failed deletion is only logged as a warning.
    """
    removed = []
    for path in leftovers(directory):
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (directory / replaced[1]).exists():
            path.rename(directory / replaced[1])
            continue
        if _deleted(path):
            removed.append(path)
    return removed


def delete_tree(path: Path) -> None:
    """Remove a file or folder without following links."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _deleted(path: Path) -> bool:
    try:
        hit("checkpoint.delete_renamed")
        delete_tree(path)
    except OSError as error:
        log.warn(f"cannot delete {path.name}: {error.strerror}; it uses disk space, but is not used any more")
        return False
    return True


def delete_checkpoint(directory: Path, step: int, incarnation: int) -> None:
    """Remove a complete checkpoint. Rename it first, so that a partly deleted folder does not look complete.

    Raises OSError, and changes nothing, if the checkpoint is write-protected or cannot be renamed.
    """
    path = directory / step_name(step)
    doomed = directory / f"{step_name(step)}.deleted.{incarnation}"
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it is write-protected", str(path))
    path.rename(doomed)
    _deleted(doomed)


def withdraw_checkpoint(directory: Path, step: int, incarnation: int) -> None:
    """Remove a checkpoint that no start may load any more, because the run went back to an older step.

    If it cannot be deleted, for example because it is write-protected, it is renamed to step_….rewound.…. Renaming
    needs write access to `directory` only. Failures are logged as warnings.
    """
    try:
        delete_checkpoint(directory, step, incarnation)
    except OSError as error:
        path = directory / step_name(step)
        count = len(list(directory.glob(f"{path.name}.rewound.*")))
        aside = directory / f"{path.name}.rewound.{incarnation}.{count}"
        try:
            path.rename(aside)
        except OSError as second:
            log.warn(f"cannot delete or rename {path.name}: {second.strerror}; remove it, or the next start loads it")
            return
        log.warn(f"cannot delete {path.name}: {error.strerror}; it is now {aside.name}, which no start loads")


def temporary(directory: Path, step: int, incarnation: int) -> Path:
    """Return the path of the folder that a save writes into until the checkpoint is complete."""
    return directory / f"{step_name(step)}.tmp.{incarnation}"


def begin(directory: Path, step: int, incarnation: int, needed_bytes: int = 0) -> Path:
    """Create the empty folder at the path that `temporary` returns. Files of an earlier attempt are removed.

    Raises OSError with ENOSPC, and leaves no folder, if the file system has fewer than `needed_bytes` free.
    """
    building = temporary(directory, step, incarnation)
    delete_tree(building)
    building.mkdir()
    sync_directory(directory)
    free = os.statvfs(directory)
    if free.f_bavail * free.f_frsize < needed_bytes:
        building.rmdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return building


def commit(directory: Path, manifest: Manifest, content: bytes, incarnation: int) -> Path:
    """Turn the temporary folder of this start into a complete checkpoint. `content` is the text of `manifest`.

    All shards must already be flushed to the device. Afterwards LATEST names this checkpoint, and BEST names it if its
    held-out loss is the lowest.
    """
    step = manifest.progress.step
    building = temporary(directory, step, incarnation)
    final = directory / step_name(step)
    hit("checkpoint.before_manifest")
    write_durably(building / MANIFEST, content)
    hit("checkpoint.manifest_written")
    write_durably(building / MANIFEST_DIGEST, digest_line(content))
    sync_directory(building)
    hit("checkpoint.before_rename")
    replaced = directory / f"{final.name}.replaced.{incarnation}"
    try:
        if final.exists():  # a checkpoint of this step exists, for example from before a rewind
            delete_tree(replaced)
            final.rename(replaced)
            hit("checkpoint.replaced")
        building.rename(final)
    except OSError:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        raise
    sync_directory(directory)
    hit("checkpoint.before_latest")
    point_latest(directory, final.name)
    if manifest.progress.is_best:
        point_best(directory, final.name)
    if replaced.exists():
        delete_tree(replaced)
    return final


def point_latest(directory: Path, name: str) -> None:
    """Write `name`, the newest checkpoint's name, to the file LATEST. The file is replaced by a rename."""
    write_atomically(directory / LATEST, f"{name}\n", lambda: hit("checkpoint.latest_written"))
    hit("checkpoint.latest_moved")


def point_best(directory: Path, name: str) -> None:
    """Write `name`, the checkpoint with the lowest held-out loss (train.keep_best), to the file BEST."""
    write_atomically(directory / BEST, f"{name}\n")


def read_latest(directory: Path, pointer: str = LATEST) -> str:
    """Return the checkpoint's name in the file LATEST or BEST. Returns '' if the file has no valid name."""
    try:
        with (directory / pointer).open("rb") as file:
            text = file.read(64).decode("ascii", errors="replace")
    except OSError:
        return ""
    return text[:-1] if text.endswith("\n") and named_step(text[:-1]) is not None else ""


def read_manifest(path: Path) -> tuple[Manifest, bytes]:
    """Return the manifest of a complete checkpoint and its bytes.

    Raises DamagedCheckpoint if the manifest does not match its digest or the folder's name.
    """
    step = step_of(path)
    where = path / MANIFEST
    try:
        content = manifest_bytes(path)
    except BrokenManifest as error:
        raise DamagedCheckpoint(error.problem) from error
    manifest = parse(content, str(where))
    if manifest.progress.step != step:
        raise DamagedCheckpoint(
            f"is of step {manifest.progress.step}, but its folder is named for step {step}", where=str(where)
        )
    return manifest, content


def unexpected_files(path: Path, manifest: Manifest) -> list[str]:
    """Return the names of files in a checkpoint's folder that its manifest does not list."""
    known = {MANIFEST, MANIFEST_DIGEST, *(shard.file for shard in manifest.shards)}
    return sorted(entry.name for entry in os.scandir(path) if entry.name not in known)


@contextlib.contextmanager
def writing(where: Path, needed_bytes: int) -> Iterator[None]:
    """Context that turns an OSError of its body into CannotWrite with the cause.

    If the disk is full, the message contains the needed space and the free space.
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
            free_bytes = format_bytes(free.f_bavail * free.f_frsize)
            what += f"; it needs {format_bytes(needed_bytes)}, and {free_bytes} and {free.f_favail} files are free"
            fix = (
                "free space, raise the quota or ulimit -f, or lower train.keep_checkpoints; the checkpoints before "
                "this one are untouched"
            )
        raise CannotWrite(what, fix, str(where)) from error
