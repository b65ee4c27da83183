"""Creates and reads the secret with which the ranks of a job authenticate each other.

The module also makes the job's private folder on each node.

This project's launchers pass the secret in FRONTIER_LLM_SECRET, because only the same user can read a process's
environment. With other launchers (torchrun, mpirun, a bare srun) rank 0 writes it into the run directory, in a file
that only this user can read.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

from frontier_llm.errors import FrontierError
from frontier_llm.run.launchers import RankEnv
from frontier_llm.run.node_folders import PREFIX, hold, remove_stale
from frontier_llm.run.rank_env import environ

VARIABLE = "FRONTIER_LLM_SECRET"
SHORTEST = 32  # characters: 128 bits if they are hexadecimal digits
POLL_S = 0.02


def new_secret() -> str:
    """Return a random secret, which a launcher passes to its ranks."""
    return secrets.token_hex(32)


class JobSecret:
    """The secret of this process's job. Calling the object returns the secret."""

    def __init__(self, place: RankEnv, run_dir: Path) -> None:
        """Create the secret on rank 0 if the launcher passed none.

        Raises FrontierError for a secret that is too short.
        """
        given = environ(VARIABLE) or (new_secret() if place.world_size == 1 else "")
        if given and len(given) < SHORTEST:
            raise FrontierError(
                f"has {len(given)} characters, at least {SHORTEST} are needed",
                "unset it, or set it to the output of openssl rand -hex 32",
                VARIABLE,
            )
        self._given = given.encode()
        self._place = place
        self._path = run_dir / f".rendezvous-{place.master_port}"
        self._made_folder = not run_dir.exists()
        if place.rank == 0 and not given:
            self._write()

    def __call__(self) -> bytes:
        """Return the secret. Raises OSError until rank 0 has written it, and if other users can access the file."""
        if self._given:
            return self._given
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise PermissionError(f"{self._path} belongs to another user or is accessible to others: delete it")
            # the file can contain the secret of an earlier start, so each new connection reads the file again
            return file.read(1024)

    def wait(self, timeout_s: float) -> bytes:
        """Return the secret. Raises FrontierError if this rank cannot read it within that time."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self()
            except OSError as error:
                if time.monotonic() > deadline_s:
                    fix = (
                        f"check that rank 0 started and that the run directory is shared, or export the same "
                        f"{VARIABLE} for all ranks"
                    )
                    raise FrontierError(
                        f"cannot read the job's secret, which rank 0 writes, within {timeout_s:g} s: {error}",
                        fix,
                        str(self._path),
                    ) from error
                time.sleep(POLL_S)

    def forget(self) -> None:
        """Delete the secret's file on rank 0 when the job ends."""
        if self._place.rank == 0 and not self._given:
            self._path.unlink(missing_ok=True)
            if self._made_folder:
                with suppress(OSError):  # the folder may still contain other files
                    self._path.parent.rmdir()

    def _write(self) -> None:
        building = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(building, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(new_secret().encode())
                file.flush()
                os.fsync(descriptor)
            building.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                building.unlink()
            fix = f"make the run directory writable, or export the same {VARIABLE} for all ranks"
            raise FrontierError(f"cannot write the job's secret: {error.strerror}", fix, str(self._path)) from error


def folder_of(secret: bytes) -> Path:
    """Return the path of the job's folder on this node's local disk. Its name cannot be guessed without the secret."""
    local = Path(environ("FRONTIER_LLM_NODE_LOCAL") or "/tmp")  # noqa: S108 the job makes its own folder there
    if not local.is_dir():
        local = Path("/tmp")  # noqa: S108 the job makes its own folder there
    return local / f"{PREFIX}{hmac.digest(secret, b'folder', 'sha256').hex()[:32]}"


def private_folder(secret: bytes) -> Path:
    """Return the job's folder on this node. The first rank on the node creates it.

    Raises FrontierError if other users can access the folder.
    """
    folder = folder_of(secret)
    try:
        folder.mkdir(mode=0o700)
        remove_stale(folder.parent)
    except FileExistsError:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise FrontierError(
                "already exists, and is not a private folder of this user",
                f"start again, and with another {VARIABLE} if it is set: the name depends on the secret",
                str(folder),
            ) from None
    except OSError as error:
        raise FrontierError(
            f"cannot create the job's folder: {error.strerror}",
            "set FRONTIER_LLM_NODE_LOCAL to a folder on a local disk",
            str(folder),
        ) from error
    hold(folder)
    return folder
