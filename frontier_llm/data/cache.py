"""Caches arrays in files: one process computes an array, and all other processes memory-map its file.

A file is written under a temporary name and then renamed. Arrays are never pickled.

Correctness depends only on the atomic rename. The lock file only avoids repeated work: one rank of a job computes, and
all other ranks wait. If the lock's time stamp does not change for `STALE_S`, its holder counts as dead, and a waiting
rank computes instead. If two ranks take over the same lock, both compute, but the result stays correct. The file system
needs only exclusive creation and rename, so the cache also works on Lustre without flock.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from frontier_llm import log
from frontier_llm.errors import DataError
from frontier_llm.files import write_durably
from frontier_llm.run.holder import is_running, process_start
from frontier_llm.run.threads import Heartbeat

HEARTBEAT_S = 5.0
STALE_S = 60.0
POLL_S = 0.2


def cached_array(path: Path, length: int, dtype: DTypeLike, build: Callable[[NDArray[Any]], None]) -> NDArray[Any]:
    """Return the memory-mapped array at `path` (.npy). If it does not exist, one process makes it with `build(array)`.

    Raises DataError if the directory cannot be written, or if the file does not hold `length` elements of `dtype`.
    """
    lock = path.with_suffix(".lock")
    try:
        while not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with held(lock) as mine:
                if mine and not path.exists():
                    _write(path, length, dtype, build)
            if not mine and not is_alive(lock):
                lock.unlink(missing_ok=True)
            time.sleep(0 if mine else POLL_S)
    except OSError as error:
        fix = "set data.cache_dir to a directory you can write"
        raise DataError(f"cannot write: {error.strerror or error}", where=str(path), fix=fix) from error
    fix = f"delete {path}; the next start creates it again"
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    # a .npy header is a Python literal; errors of tokenize, ast and NumPy have no common base
    except Exception as error:
        raise DataError(f"is not a .npy array: {error}", where=str(path), fix=fix) from error
    if array.shape != (length,) or array.dtype != np.dtype(dtype):
        what = f"expected {np.dtype(dtype)}[{length}], found {array.dtype}{list(array.shape)}"
        raise DataError(what, where=str(path), fix=fix)
    return np.asarray(array)


@contextmanager
def held(lock: Path, purpose: str = "") -> Iterator[bool]:
    """Hold the lock file and touch it every few seconds. Yield True, or False if another process holds the lock.

    A background thread touches the file. This thread also runs during compiled code of the process, because such code
    releases the GIL.
    """
    pid = os.getpid()
    try:
        write_durably(lock, f"{socket.gethostname()} {pid} {process_start(pid) or '-'} {purpose}\n".encode())
    except FileExistsError:
        yield False
        return
    except OSError:
        lock.unlink(missing_ok=True)  # with a lock file that does not name its holder, all processes would wait
        raise
    heartbeat = Heartbeat(lock, HEARTBEAT_S)
    try:
        yield True
    finally:
        heartbeat.stop()
        lock.unlink(missing_ok=True)


def is_alive(lock: Path) -> bool:
    """Return whether a lock's holder is alive.

    A holder on this host is alive if its process exists and has not been replaced by another process with its pid. A
    holder on another host is alive if its heartbeat arrives within STALE_S. A lock that does not exist has no live
    holder.
    """
    with suppress(FileNotFoundError):
        host, pid, start = (*lock.read_text(encoding="utf-8").split(), "", "", "")[:3]
        if host == socket.gethostname():
            # A lock of an older version has no start time, only a digest of 64 characters.
            is_start = start.isdigit() and len(start) < 64
            return pid.isdigit() and is_running(int(pid), start if is_start else "")
        touched_ns = lock.stat().st_mtime_ns
        since = time.monotonic()
        while time.monotonic() - since < STALE_S:  # measured by this host's clock, because file servers' clocks differ
            time.sleep(POLL_S)
            if lock.stat().st_mtime_ns != touched_ns:
                return True
        log.warn(f"{lock}: its holder has not renewed it for {STALE_S:.0f} s; this process takes the lock")
    return False


def _write(path: Path, length: int, dtype: DTypeLike, build: Callable[[NDArray[Any]], None]) -> None:
    temporary = path.with_name(f"{path.name}.tmp.{socket.gethostname()}.{os.getpid()}")
    try:
        array = np.lib.format.open_memmap(
            temporary,
            mode="w+",
            dtype=np.dtype(dtype),
            shape=(length,),
        )
        # Reserve the space: a write to the map on a full file system ends the process with SIGBUS.
        with temporary.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        build(array)
        array.flush()
        del array
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
