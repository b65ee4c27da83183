"""Files that a reader sees whole or not at all, whatever crashes while they are written."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Make renames and new names in a folder durable: else a power loss may bring the old content back."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str) -> None:
    """Replace a small file so that a reader sees the old or the new content, never half of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with building.open("x", encoding="utf-8") as file:  # not mkstemp, whose files only their owner can read
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        building.replace(path)
        sync_directory(path.parent)
    except BaseException:
        building.unlink(missing_ok=True)
        raise
