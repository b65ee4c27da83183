"""A folder with a URL in which files are listed, read, written and deleted through fsspec.

Credentials come from the clients' own environment (AWS_*, FSSPEC_*, GOOGLE_APPLICATION_CREDENTIALS, …).
Every error of a client becomes UnreachableError.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from frontier_llm.config.urls import folder_fault, without_secrets
from frontier_llm.data.remote import RemoteFile, UnreachableError, file_system, reached
from frontier_llm.errors import ConfigError
from frontier_llm.files import write_atomically

# keys under which clients report the time of the last change
_TIMES = ("LastModified", "last_modified", "updated", "created", "mtime")
_AGAIN = "check the address, the network and the credentials, then try again: files that have arrived are kept"


@dataclass(frozen=True)
class RemoteEntry:
    """One name in a remote folder."""

    is_folder: bool
    size_bytes: int
    changed_unix_s: float | None  # None if the store does not report it


class RemoteFolder:
    """A folder with a URL. It need not exist: an object store creates it with its first file."""

    def __init__(self, url: str) -> None:
        """Raises FrontierError if the package for this protocol is missing, or if the URL contains credentials."""
        if fault := folder_fault(url):
            raise ConfigError(fault, where=without_secrets(url))
        self.url = url.rstrip("/")
        with reached(self.url, _AGAIN):
            self._files, self._path = file_system(self.url)
        self._is_local = bool(getattr(self._files, "local_file", False))  # file:// has real folders

    def below(self, name: str) -> RemoteFolder:
        """Return the folder `name` in this folder."""
        return RemoteFolder(f"{self.url}/{name}")

    def entries(self) -> dict[str, RemoteEntry]:
        """Return the names in this folder. Empty if it does not exist."""
        with reached(self.url, _AGAIN, "listed"):
            self._files.invalidate_cache()
            try:
                listing = self._files.ls(self._path, detail=True)
            except FileNotFoundError:
                return {}
        found = {str(info["name"]).rstrip("/").rpartition("/")[2]: _entry(info) for info in listing}
        found.pop("", None)  # the marker of an empty folder
        return found

    def file(self, name: str, size_bytes: int) -> RemoteFile:
        """Return the file `name`, which has this size in the listing."""
        return RemoteFile(f"{self.url}/{name}", size_bytes)

    def read(self, name: str, limit: int) -> bytes | None:
        """Return at most `limit` + 1 bytes of a file. None if the file does not exist."""
        with reached(f"{self.url}/{name}", _AGAIN):
            try:
                with self._files.open(f"{self._path}/{name}", "rb") as file:
                    return bytes(file.read(limit + 1))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Replace the content of a small file. A reader sees either the old or the new content."""
        if self._is_local:
            with reached(f"{self.url}/{name}", _AGAIN, "written"):
                write_atomically(Path(self._path) / name, content)
            return
        with self.created(name) as write:
            write(content)

    @contextmanager
    def created(self, name: str) -> Iterator[Callable[[bytes | memoryview], object]]:
        """Replace a file. Yields the function that appends to the new content.

        After an error the store may have the beginning of the content under this name.
        """
        with reached(f"{self.url}/{name}", _AGAIN, "written"):
            if self._is_local:
                self._files.makedirs(self._path, exist_ok=True)
            with self._files.open(f"{self._path}/{name}", "wb") as file:
                yield file.write

    def delete_file(self, name: str) -> None:
        """Remove one file. A missing file is no error."""
        with reached(f"{self.url}/{name}", _AGAIN, "deleted"):
            self._files.invalidate_cache()
            if self._files.exists(f"{self._path}/{name}"):
                self._files.rm_file(f"{self._path}/{name}")

    def delete(self) -> None:
        """Remove the folder with everything in it."""
        with reached(self.url, _AGAIN, "deleted"):
            self._files.invalidate_cache()
            if self._files.exists(self._path):
                self._files.rm(self._path, recursive=True)

    def check_writable(self) -> None:
        """Write a small file, read it back and delete it. Raises UnreachableError."""
        name = f".writable-{uuid.uuid4().hex}"
        content = name.encode()
        self.write(name, content)
        returned = self.read(name, len(content))
        self.delete_file(name)
        if returned != content:
            raise UnreachableError(
                "the store does not return the bytes that were written", fix=_AGAIN, where=without_secrets(self.url)
            )


def _entry(info: dict[str, Any]) -> RemoteEntry:
    changed = next((info[key] for key in _TIMES if info.get(key) is not None), None)
    if isinstance(changed, datetime):
        changed = changed.timestamp()
    return RemoteEntry(
        is_folder=info["type"] == "directory",
        size_bytes=int(info.get("size") or 0),
        changed_unix_s=float(changed) if isinstance(changed, int | float) else None,
    )
