"""System packages that a test needs: skipped with the package's name in a user's run, an error where nothing may be skipped."""

import errno
import io
import os
import shutil

import pytest


class FullDisk(io.StringIO):
    """A text stream on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        self.write("")


def require_program(program: str, package: str) -> str:
    """Path of a program; without it the test is skipped, or fails where FRONTIER_LLM_NO_SKIP is set (CI)."""
    path = shutil.which(program)
    if path is None:
        missing(f"needs {program}: apt-get install {package}")
    return path


def missing(reason: str) -> None:
    """Skip, or fail where nothing may be skipped."""
    if os.environ.get("FRONTIER_LLM_NO_SKIP"):
        pytest.fail(reason)
    pytest.skip(reason)
