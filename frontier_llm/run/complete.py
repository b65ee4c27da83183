"""Finds the newest complete checkpoint of a run. Does not import torch. Called when a checkpoint is loaded, by the
supervisor and by `status`.

A checkpoint `step_00000100/` is complete if its manifest matches its digest and every shard has its full size.
The file LATEST is only for users. No code reads this file to choose a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from frontier_llm.errors import Problem
from frontier_llm.files import (
    LIFT_HINT,
    lifted_bound,
    open_plain,
    read_beyond,
)
from frontier_llm.units import strict_json

MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"
MAX_MANIFEST_BYTES = 1 << 26  # 20 times the manifest of 1T on 3072 ranks, which lists 72,087 pieces
_NAME = re.compile(r"step_([0-9]{8,12})")


class BrokenManifest(Exception):
    """A manifest that cannot be read or does not match its digest."""

    def __init__(self, path: Path, what: str, fix: str = "") -> None:
        super().__init__(f"{path}: {what}")
        self.problem = Problem(str(path), what, fix)


def step_name(step: int) -> str:
    """100 -> 'step_00000100'."""
    return f"step_{step:08}"


def named_step(name: str) -> int | None:
    """Return the step in a checkpoint's name. None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def named_steps(directory: Path) -> list[int]:
    """Return the steps of all folders that are named like a checkpoint, newest first. Links are left out. Raises
    OSError."""
    if not directory.is_dir():
        return []
    with os.scandir(directory) as entries:
        steps = [named_step(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted((step for step in steps if step is not None), reverse=True)


def digest_line(content: bytes) -> bytes:
    """Return the content of manifest.sha256, in the format of `sha256sum --check`."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()


def manifest_bytes(path: Path) -> bytes:
    """Return the manifest of the checkpoint `path` after comparing it with its digest. Raises BrokenManifest."""
    limit = lifted_bound(MAX_MANIFEST_BYTES)
    content = _read_small(path / MANIFEST, limit)
    if len(content) > limit:
        raise BrokenManifest(path / MANIFEST, f"is larger than {limit} bytes, the limit for a manifest", LIFT_HINT)
    recorded = _read_small(path / MANIFEST_DIGEST, 1024)
    if recorded != digest_line(content):
        actual = digest_line(content).decode().split()[0]
        expected = recorded[:64].decode("ascii", errors="replace")
        what = f"sha256 is {actual}, but {MANIFEST_DIGEST} records {strict_json(expected)}"
        raise BrokenManifest(path / MANIFEST, what)
    return content


def _read_small(path: Path, limit: int) -> bytes:
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            return read_beyond(file, limit)
    except OSError as error:
        raise BrokenManifest(path, f"cannot be read: {error.strerror}") from error


def fault(path: Path) -> Problem | None:
    """Return the reason why the checkpoint `path` is incomplete. None if the checkpoint is complete.

    The contents of the shards are not read.
    """
    try:
        content = manifest_bytes(path)
        manifest = json.loads(content)
        step = manifest["progress"]["step"]
        sizes = {str(shard["file"]): shard["bytes"] for shard in manifest["shards"]}
    except BrokenManifest as error:
        return error.problem
    except (ValueError, TypeError, KeyError, RecursionError):
        return Problem(str(path / MANIFEST), "is not a manifest")
    if type(step) is not int or step != named_step(path.name):
        return Problem(str(path / MANIFEST), f"belongs to step {step}, but its folder is {path.name}")
    return _shard_fault(path, sizes)


def _shard_fault(path: Path, sizes: dict[str, object]) -> Problem | None:
    """Return the first shard that is missing or has another size. None if all shards are complete."""
    # one scan of the folder instead of one stat per name: a parallel file system prefetches file attributes in a scan
    missing = dict(sizes)
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name not in missing:
                    continue
                expected = missing.pop(entry.name)
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    return Problem(entry.path, "is not a regular file")
                if status.st_size != expected:
                    return Problem(entry.path, f"has {status.st_size} bytes, but the manifest records {expected}")
    except OSError as error:
        return Problem(str(error.filename or path), f"cannot be read: {error.strerror}")
    if missing:
        return Problem(str(path / min(missing)), "is missing")
    return None


def faults(directory: Path) -> Iterator[tuple[int, Problem | None]]:
    """Yield (step, fault or None) for each checkpoint of a `checkpoints` folder, newest first."""
    for step in named_steps(directory):
        yield step, fault(directory / step_name(step))


def newest_complete(directory: Path) -> int | None:
    """Return the step of the newest complete checkpoint in a `checkpoints` folder. None if there is none.

    Raises OSError.
    """
    return next((step for step, problem in faults(directory) if problem is None), None)
