"""System packages that a test needs: skipped with the package's name in a user's run, an error where nothing may be
skipped.
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
    """A text stream on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        self.write("")


@contextlib.contextmanager
def full_disk(place: Path, room_kib: int = 16, fill: bool = True) -> Iterator[Path]:
    """A folder that is a file system of its own, of so many KiB and without room; unless `fill`, whoever writes
    fills it.
    """
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
    """Path of a program; without it the test is skipped, or fails where FRONTIER_LLM_NO_SKIP is set (CI)."""
    path = shutil.which(program)
    if path is None:
        missing(f"needs {program}: apt-get install {package}")
    return path


def missing(reason: str) -> NoReturn:
    """Skip, or fail where nothing may be skipped."""
    if os.environ.get("FRONTIER_LLM_NO_SKIP"):
        pytest.fail(reason)
    pytest.skip(reason)
