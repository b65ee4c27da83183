"""Free space for a run: whether the run directory can be written, and whether logs and checkpoints fit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.blueprint.optimizers import state_bytes
from frontier_llm.config import RunConfig, expired_steps, saves_between
from frontier_llm.errors import Problem
from frontier_llm.run.complete import named_steps
from frontier_llm.units import format_bytes, plural

LOG_BYTES = 2**20  # space for the logs of a start


@dataclass(frozen=True)
class FreeSpace:
    """Free space of a file system. `files` is None if the number of files is not limited, or was not measured."""

    bytes: int
    files: int | None = None


def free_space(directory: Path) -> FreeSpace:
    """Return the free space of a directory's file system. The directory may not exist yet."""
    disk = os.statvfs(_existing(directory))
    is_limited = disk.f_files != 0  # 0 on a file system without a table of files
    return FreeSpace(bytes=disk.f_bavail * disk.f_frsize, files=disk.f_favail if is_limited else None)


def first_checkpoints(config: RunConfig) -> int:
    """Return the number of checkpoints for which a start needs space: two, or one if the first save makes an old
    checkpoint expire.

    Checkpoints that `keep_every` keeps, and the best checkpoint, are not deleted and free no space.
    """
    train = config.train
    steps = named_steps(Path(train.run_dir) / "checkpoints")
    done = steps[0] if steps else 0
    expired = expired_steps([done + 1, *steps], train.keep_checkpoints, train.keep_every)
    may_be_best = 1 if train.keep_best else 0
    return min(saves_between(train, done, train.steps), 1 if len(expired) > may_be_best else 2)


def needed_bytes(config: RunConfig) -> int:
    """Return the size of a start's logs and first checkpoints."""
    one_bytes = state_bytes(config.model, config.optimizer.name, config.precision.dtype)
    return LOG_BYTES + first_checkpoints(config) * one_bytes


def space_problems(config: RunConfig, free: FreeSpace, world_size: int = 0) -> list[Problem]:
    """Return a problem if the disk has too few bytes or files for the logs and first checkpoints of a start.

    `world_size` is only needed if `free` has the number of files.
    """
    count = first_checkpoints(config)
    # a log per rank; per checkpoint a shard of each rank, manifest, digest and folder
    needed_files = world_size + count * (world_size + 3)
    needed = format_bytes(needed_bytes(config))
    available = format_bytes(free.bytes)
    if free.files is not None:
        needed += f" and {needed_files} files"
        available += f" and {free.files} files"
    if needed_bytes(config) <= free.bytes and (free.files is None or needed_files <= free.files):
        return []
    directory = Path(config.train.run_dir).resolve()
    written = f"logs and the first {plural(count, 'checkpoint')}" if count else "logs"
    what = f"{written} need {needed}, but {directory} has {available} free"
    fix = "free space, request a larger quota, or choose another train.run_dir"
    return [Problem(where="train.run_dir", what=what, fix=fix)]


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.absolute().parents) if path.exists())


def run_dir_problems(run_dir: Path) -> list[Problem]:
    """Return a problem if the run directory cannot be created and written, or if it holds a config.yaml that belongs to
    no run.
    """
    others = run_dir / "config.yaml"
    if others.is_file() and not any((run_dir / name).exists() for name in ("plan.json", "checkpoints")):
        what = f"{others} does not belong to a run, and a run there would overwrite it"
        return [Problem(where="train.run_dir", what=what, fix="rename that file, or choose another directory")]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        file = next((path for path in (run_dir, *run_dir.parents) if path.is_file()), None)
        why = f"{file} is a file" if file else error.strerror
        return [
            Problem(
                where="train.run_dir",
                what=f"{run_dir} cannot be written: {why}",
                fix="choose a directory you can write to",
            )
        ]
    return []
