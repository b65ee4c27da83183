"""Creates temporary folders on a node, and removes folders that killed processes have left behind.

Every process that uses a folder holds a shared lock on its file `in_use`. The kernel releases the lock when the process
ends. A folder without any lock is stale.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from frontier_llm import log

PREFIX = "frontier-llm-"
IN_USE = "in_use"
STALE_AFTER_S = 600.0  # a younger folder may belong to a process that has not locked it yet
MOST_REMOVED = 64  # limit per start, because removal delays the start
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-z_]{8,32}")
_held: dict[Path, int] = {}


def hold(folder: Path) -> None:
    """Lock a folder of this user until this process ends.

    On a file system without locks the folder cannot be locked, and is never removed.
    """
    with suppress(OSError):
        if folder in _held and os.fstat(_held[folder]).st_ino == (folder / IN_USE).lstat().st_ino:
            return
    with suppress(OSError):
        descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _held[folder] = descriptor
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove_stale(root: Path) -> list[Path]:
    """Remove the folders of this user below `root` whose processes have ended. Return the removed folders.

    A folder that cannot be removed stays.
    """
    removed: list[Path] = []
    try:
        with os.scandir(root) as entries:
            candidates = [Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name)]
    except OSError:
        return removed
    for folder in candidates:
        if len(removed) < MOST_REMOVED and _remove_if_stale(folder):
            removed.append(folder)
    if removed:
        log.info(f"removed {len(removed)} folders in {root} that killed processes had left")
    return removed


def _remove_if_stale(folder: Path) -> bool:
    """Remove a folder that belongs to this user, is private, and is not locked. Return whether it was removed."""
    try:
        status = folder.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700
        if not is_own or time.time() - status.st_mtime < STALE_AFTER_S:
            return False
        descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder in the temporary directory and remove it after the body.

    If this process is killed, a later process removes the folder.
    """
    root = Path(tempfile.gettempdir())
    remove_stale(root)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=root) as name:
        folder = Path(name)
        hold(folder)
        try:
            yield folder
        finally:
            if folder in _held:
                os.close(_held.pop(folder))
