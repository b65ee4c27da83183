"""Checks for system packages that a test needs.

Without the package the test is skipped in a user's test run. If skipping is forbidden, it fails. Both messages name the
package.
"""

import contextlib
import errno
import io
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest


class FullDisk(io.StringIO):
    """Text stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        self.write("")


@contextlib.contextmanager
def full_disk(place: Path, room_kib: int = 16, fill: bool = True) -> Iterator[Path]:
    """Mount a small file system of `room_kib` KiB. With `fill` it is filled at once, otherwise the test fills it."""
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={room_kib}k,nr_inodes=64", "tmpfs", str(place)], capture_output=True
    ).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        if fill:
            with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def require_program(program: str, package: str) -> str:
    """Return the path of a program. Without it the test is skipped, or fails if FRONTIER_LLM_NO_SKIP is set (CI)."""
    path = shutil.which(program)
    if path is None:
        missing(f"needs {program}: apt-get install {package}")
    return path


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it if skipping is forbidden."""
    if os.environ.get("FRONTIER_LLM_NO_SKIP"):
        pytest.fail(reason)
    pytest.skip(reason)
