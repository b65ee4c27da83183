"""Durable and atomic file writes, and bounded reads.

A write is on the device when the call returns, and no reader sees a partly written file.
Readers of untrusted files limit how much they read. The variable FRONTIER_LLM_LIFT_BOUNDS multiplies all limits, for a
manifest of 75,000 ranks or a model with more tensors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from frontier_llm.errors import ConfigError, FrontierError

NEW_FILE = 0o666  # mode of a new file before the umask, so that a group can share a run directory


class NamedFile(io.FileIO):
    """File that adds its path to write errors. A bare ENOSPC does not name the file."""

    def write(self, data: Any, /) -> int:
        """Write like `io.FileIO.write`, but the OSError of a failed write has the file's name."""
        try:
            return super().write(data)
        except OSError as error:
            error.filename = str(self.name)
            raise


def write_all(descriptor: int, data: memoryview, start: int) -> None:
    """Write `data` from byte `start` of the file on with os.pwrite, until everything is written."""
    while data:
        count = os.pwrite(descriptor, data, start)
        data = data[count:]
        start = start + count


def open_plain(path: Path) -> int:
    """Open a regular file for reading. Raises OSError for symlinks, hard links, devices and directories."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    is_plain = stat.S_ISREG(status.st_mode)
    if is_plain and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    what = "is a hard link: copy the file" if is_plain else "is not a regular file"  # a folder always has several links
    raise OSError(errno.EINVAL, what, str(path))


def open_below(folder: Path, name: str, flags: int) -> int:
    """Open the file `name` below `folder` without following links. Create missing folders.

    `folder` itself can be a link that the user has made. Raises FrontierError for a link or a device below `folder`,
    and OSError for any other fault.
    """
    *parents, last = PurePath(name).parts
    inner = _enter(folder, parents)
    try:
        # a FIFO without a reader must not block
        descriptor = os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, NEW_FILE, dir_fd=inner)
    except OSError as error:
        raise _not_below(error, folder / name) from None
    finally:
        os.close(inner)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FrontierError("is not a regular file", "move it away", str(folder / name))
    os.set_blocking(descriptor, True)
    return descriptor


def write_replaced(path: Path, content: bytes) -> None:
    """Replace the file `path` with a new one. A link is removed, not followed. The file is not flushed to the
    device.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, NEW_FILE)
    try:
        write_all(descriptor, memoryview(content), 0)
    finally:
        os.close(descriptor)


def folder_below(folder: Path, name: str) -> Path:
    """Create the folder `name` below `folder` if it is missing, without following links.

    Raises the same errors as `open_below`.
    """
    os.close(_enter(folder, PurePath(name).parts))
    return folder / name


def _enter(folder: Path, parts: Sequence[str]) -> int:
    """Return a descriptor of the folder `parts` below `folder`. Create missing folders without following links."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    done = folder
    for part in parts:
        done /= part
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=descriptor)
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
        except OSError as error:
            raise _not_below(error, done) from None
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def _not_below(error: OSError, path: Path) -> Exception:
    """Return the error to raise: FrontierError for a link or a device, otherwise `error` with the complete path."""
    if path.is_symlink():
        what = f"is a link to {os.readlink(path)}; nothing is written through links below a run directory"
        return FrontierError(
            what,
            "remove the link; the run directory itself and its checkpoints/ may be links",
            str(path),
        )
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
        return FrontierError(f"cannot be replaced: {error.strerror}", "move it away", str(path))
    error.filename = str(path)
    return error


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """Create a file and yield its descriptor. The file is flushed to the device at the end."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, NEW_FILE)
    try:
        yield descriptor
        os.fsync(descriptor)
    except OSError as error:
        if error.errno:  # the error of write(2) does not name the file
            error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Create a new file and flush it to the device."""
    with created(path) as descriptor:
        write_all(descriptor, memoryview(content), 0)


def sync_directory(path: Path) -> None:
    """Make renames and new names in a folder durable. Otherwise a power loss can restore the old content."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes, on_written: Callable[[], None] = lambda: None) -> None:
    """Replace a file so that a reader sees either the old or the new content. Text is written as UTF-8.

    A missing folder is created. `on_written` is called between the flush and the rename. A pipe and a file in /dev,
    such as /dev/stdout, are written directly. Raises OSError, which names the file.
    """
    if path.parent in (Path("/dev"), Path("/dev/fd")) or path.is_fifo():
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.{os.urandom(16).hex()}")
    try:
        write_durably(building, content.encode() if isinstance(content, str) else content)
        on_written()
        building.replace(path)
    except BaseException as error:
        building.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(building):
            error.filename = str(path)  # the user does not know the temporary name
        raise
    sync_directory(path.parent)


def package_digest() -> str:
    """Return a digest of the names and contents of the package's Python sources. It needs no git."""
    package = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


LIFT_VARIABLE = "FRONTIER_LLM_LIFT_BOUNDS"
LIFT_HINT = f"if the file is correct, set {LIFT_VARIABLE}=N to allow N times as much"

_times = 1


def lift_bounds(times: str | None) -> None:
    """Set the factor of `lifted_bound` from the text `times`. None sets the factor to 1.

    Raises ConfigError if the text is not a whole number from 1 to 1000.
    """
    if times is not None and not (
        times.isascii() and times.isdecimal() and 1 <= len(times) <= 4 and 1 <= int(times) <= 1000
    ):
        raise ConfigError(
            f"{times[:20]!r} is not a whole number from 1 to 1000",
            "unset it, or set it to such a number",
            LIFT_VARIABLE,
        )
    globals()["_times"] = int(times or 1)


def lifted_bound(bound: int) -> int:
    """Return `bound` times the factor that `lift_bounds` has set."""
    return bound * _times


def read_beyond(file: BinaryIO, bound: int) -> bytes:
    """Return at most `bound` + 1 bytes of a file. Allocates memory for the file's size, not for `bound`."""
    return file.read(min(bound, os.fstat(file.fileno()).st_size) + 1)
