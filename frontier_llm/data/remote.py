"""Files with a URL (s3://, gs://, hf://, https://, …), read in place through fsspec.

The classes offer the part of pathlib's interface that the readers of this package use. Credentials in a URL
(USER:SECRET@, a signed query) are used but never appear in messages, records or digests. Other credentials come from
each client's usual sources (AWS_*, HF_TOKEN, …).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from frontier_llm.config.urls import PACKAGES, is_url, protocol_of, without_secrets
from frontier_llm.errors import FrontierError, Problem, not_installed

BUFFER_BYTES = 1 << 20  # size of a read; fsspec itself fetches 5 MiB at a time
AGAIN = "check the address, the network and the credentials, then run the same command again: finished parts are kept"
# keys under which stores report a checksum, version or time of a file, strictest first; the first one present is used
VERSIONS = ["sha256", "Content-MD5", "md5Hash", "md5", "ETag", "etag", "blob_id", "generation", "crc32c", "checksum"]
VERSIONS += ["mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created"]


class UnreachableError(FrontierError):
    """A remote file cannot be read now.

    This error never counts as damage, so that --skip-damaged does not leave data out because of a network failure.
    """


class Stat(NamedTuple):
    """Size of a remote file, and `version`: a checksum, version or time that the store reports for its content."""

    st_size: int
    version: str


def reason_of(error: Exception) -> str:
    """Return the first line of a client's error, or the error's type if it has no text."""
    return without_secrets((str(error) or repr(error)).splitlines()[0])


class RemoteFile:
    """A file with a URL. Every error of its client becomes UnreachableError."""

    def __init__(self, url: str, size_bytes: int | None = None, version: str = "") -> None:
        """`size_bytes` and `version` come from a listing. With None they are requested at first use."""
        self.url = url
        self._stat = None if size_bytes is None else Stat(size_bytes, version)
        self.name = PurePosixPath(str(self)).name

    def __str__(self) -> str:
        return without_secrets(self.url)

    @property
    def suffix(self) -> str:
        """Suffix of the name, as in pathlib."""
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        """Name without its suffix, as in pathlib."""
        return PurePosixPath(self.name).stem

    def stat(self) -> Stat:
        """Return the file's size and version."""
        if self._stat is None:
            with reached(self.url):
                files, path = file_system(self.url)
                self._stat = _stat(str(self), files.info(path))
        return self._stat

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the file for reading, with seeking."""
        assert mode == "rb"
        with reached(self.url):
            files, path = file_system(self.url)
            return io.BufferedReader(_Content(self.url, files.open(path, "rb")), BUFFER_BYTES)


class _Content(io.RawIOBase):
    """An fsspec file whose errors become UnreachableError, so that readers do not treat a lost connection as damage."""

    def __init__(self, url: str, content: Any) -> None:
        self._url = url
        self._content = content

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._content.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with reached(self._url):
            return int(self._content.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        with reached(self._url):
            data = self._content.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._content.close()
        super().close()


def located(path: str | Path | RemoteFile) -> Path | RemoteFile:
    """Return a Path for a local file, or a RemoteFile for a URL."""
    if isinstance(path, RemoteFile):
        return path
    return RemoteFile(str(path)) if is_url(path) else Path(path)


def identity_of(path: Path | RemoteFile) -> tuple[str, int, int | str]:
    """Return (name, size, version) of an input, which identify its content in a plan.

    The version is the modification time of a local file, or the checksum or version that the store reports.
    """
    stat = path.stat()
    version = stat.version if isinstance(stat, Stat) else stat.st_mtime_ns
    return str(path), stat.st_size, version


def remote_files(url: str) -> list[RemoteFile]:
    """Return the file at a URL, all files below it, or all files that match a pattern with `*`, sorted by path.

    An http URL is always one file.
    """
    with reached(url):
        files, path = file_system(url)
        if "*" in path:
            listing = files.glob(path, detail=True)
        else:
            info = files.info(path)
            if info["type"] != "directory":
                return [RemoteFile(url, *_stat(without_secrets(url), info))]
            listing = files.find(path, detail=True)
        inside = sorted(
            (files.unstrip_protocol(name), info) for name, info in listing.items() if info["type"] == "file"
        )
        return [RemoteFile(name, *_stat(name, info)) for name, info in inside]


def _stat(name: str, info: dict[str, Any]) -> Stat:
    if info.get("size") is None:
        raise UnreachableError(
            "the server does not report the size of the file",
            where=name,
            fix="download the file first, and give the path of the copy",
        )
    marks = (info[key] for key in VERSIONS if info.get(key) is not None)
    return Stat(int(info["size"]), str(next(marks, "")))


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError:
        raise FrontierError(not_installed("fsspec", where=without_secrets(url))) from None
    protocol = protocol_of(url)
    if "::" in url:
        what = "is a chain of URLs, which fsspec would unpack without a limit of size"
        raise FrontierError(
            what,
            where=without_secrets(url),
            fix="give the URL of the file itself; gzip and zstd files are unpacked automatically",
        )
    try:
        files, path = url_to_fs(url)
    except ImportError:
        raise FrontierError(
            not_installed(PACKAGES.get(protocol, f"the fsspec client of {protocol}://"), where=without_secrets(url))
        ) from None
    except ValueError as error:
        raise FrontierError(
            without_secrets(str(error)),
            where=without_secrets(url),
            fix=f"known: {', '.join(PACKAGES)}",
        ) from None
    return files, str(path)


@contextmanager
def reached(url: str, fix: str = AGAIN, done: str = "read") -> Iterator[None]:
    """Turn a client's errors into UnreachableError, whose text is "cannot be `done`" and the reason.

    Clients raise OSError, ValueError or errors of their network library.
    """
    try:
        yield
    except FrontierError:
        raise
    except FileNotFoundError:
        raise UnreachableError(
            f"cannot be {done}: the server has no such file or directory, or does not allow to read it",
            where=without_secrets(url),
            fix=fix,
        ) from None
    except Exception as error:
        if "range requests" in str(error):
            fix = "the server does not support range requests: download the file first, and give its path"
        raise UnreachableError(
            Problem(where=without_secrets(url), what=f"cannot be {done}: {reason_of(error)}", fix=fix)
        ) from None
