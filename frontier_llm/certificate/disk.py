"""The places of checkpoints: whether the run directory can be written and has space, and the URL `train.remote`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from frontier_llm.blueprint.optimizers import state_bytes
from frontier_llm.checkpoint.remote_writer import taken, taken_by, this_writer
from frontier_llm.config import RunConfig, saves_between
from frontier_llm.config.urls import packages_of
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.errors import FrontierError, Problem, not_installed
from frontier_llm.run.uploads import read_uploads
from frontier_llm.units import format_bytes, plural

LOG_BYTES = 2**20  # space for logs


def free_space(directory: Path) -> tuple[int, int, bool]:
    """Return (free bytes, free files, True if the number of files is limited) of a directory's file system.

    The directory may not exist yet.
    """
    disk = os.statvfs(_existing(directory))
    is_limited = disk.f_files != 0  # 0 on a file system without a table of files
    return disk.f_bavail * disk.f_frsize, disk.f_favail, is_limited


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.absolute().parents) if path.exists())


def run_dir_problems(run_dir: Path) -> list[Problem]:
    """Return a problem if the run directory cannot be created and written, or belongs to something else."""
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


def space_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """Return a problem if the disk has too few bytes or files for logs and the first checkpoints of this start.

    The first checkpoints are those that the start writes before it can delete an old one.
    """
    train = config.train
    checkpoints = Path(train.run_dir) / "checkpoints"
    existing = len(list(checkpoints.glob("step_????????"))) if checkpoints.is_dir() else 0
    saves = saves_between(train, 0, train.steps)
    count = min(saves, 1 if existing >= train.keep_checkpoints else 2)
    needed_bytes = LOG_BYTES + count * state_bytes(config.model, config.optimizer.name, config.precision.dtype)
    # a log per rank; per checkpoint a shard of each rank, manifest, digest and folder
    needed_files = world_size + count * (world_size + 3)
    where = _existing(checkpoints)
    free_bytes, free_files, is_limited = free_space(checkpoints)
    if needed_bytes <= free_bytes and (needed_files <= free_files or not is_limited):
        return []
    return [
        Problem(
            where="train.run_dir",
            what=f"logs and the first {plural(count, 'checkpoint')} need {format_bytes(needed_bytes)} and "
            f"{needed_files} files, but {where} has {format_bytes(free_bytes)} and {free_files} files free",
            fix="free space, raise the quota, or choose another train.run_dir",
        )
    ]


def package_problems(config: RunConfig) -> list[Problem]:
    """Return a problem for each package that `train.remote` needs and that is not installed."""
    if config.train.remote is None:
        return []
    missing = [package for package in packages_of(config.train.remote) if find_spec(package) is None]
    return [not_installed(package, "train.remote") for package in missing]


def remote_problems(config: RunConfig) -> list[Problem]:
    """Return a problem if the run could not upload to `train.remote`. Writes and deletes a small file there."""
    url = config.train.remote
    if url is None:
        return []
    if problems := package_problems(config):
        return problems
    run_dir = Path(config.train.run_dir)
    try:
        place = RemoteFolder(url)
        place.check_writable()
        record = read_uploads(run_dir)
        mine = this_writer(record.writer if record else "", run_dir)
        other = taken_by(place, mine)
    except FrontierError as error:
        return list(error.problems)
    return [] if other is None else list(taken(place, other, mine).problems)
