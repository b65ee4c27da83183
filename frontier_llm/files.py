"""Files that are on the device when a call returns, and that no reader ever sees half of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def write_all(descriptor: int, data: memoryview, start: int) -> None:
    """os.pwrite from byte `start` of the file on, until everything is taken."""
    while data:
        count = os.pwrite(descriptor, data, start)
        data, start = data[count:], start + count


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """The descriptor of a new file, which is flushed to the device at the end."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Create a new file and flush it to the device."""
    with created(path) as descriptor:
        write_all(descriptor, memoryview(content), 0)


def sync_directory(path: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, building: Path, content: bytes, on_written: Callable[[], None] = lambda: None) -> None:
    """Give a file, by way of a new one at `building` and one rename, another content."""
    building.unlink(missing_ok=True)
    write_durably(building, content)
    on_written()
    building.rename(path)
    sync_directory(path.parent)
