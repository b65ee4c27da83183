"""Shared memory of the processes on one host.

This module checks whether processes can share memory, creates memory regions without a name, and opens a region on all
ranks of a group.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from frontier_llm.errors import BackendError
from frontier_llm.libraries import load_library

_REGION = re.compile(r"/proc/([0-9]{1,10})/fd/[0-9]{1,10}")
MEMORY_DIR = Path("/dev/shm")  # noqa: S108  # folder of POSIX shared memory on Linux


@functools.cache
def why_unavailable() -> str:
    """Return the reason why ranks of this host cannot share memory, or '' if they can."""
    if not MEMORY_DIR.is_dir() or not os.access(MEMORY_DIR, os.W_OK):
        return f"{MEMORY_DIR} is not writable"
    try:
        library()
    except BackendError as error:
        return f"{error.problems[0].what}: {error.problems[0].fix}"
    return ""


@functools.cache
def library() -> ctypes.CDLL:
    """Load the C++ library that transfers data through shared memory (csrc/shm/).

    Raises BackendError if the library has not been built.
    """
    pointer = ctypes.c_void_p
    whole = ctypes.c_int64
    number = ctypes.c_int
    size = ctypes.c_uint64
    functions: dict[str, tuple[Any, list[Any]]] = {
        "fl_shm_open": (pointer, [number, number, number, size, size, whole, ctypes.POINTER(whole)]),
        "fl_shm_close": (None, [pointer]),
        "fl_shm_start": (whole, [pointer, number, number, number, number, pointer, pointer, size]),
        "fl_shm_finish": (whole, [pointer, whole, whole]),
        "fl_shm_send": (whole, [pointer, number, pointer, size, whole]),
        "fl_shm_receive": (whole, [pointer, number, pointer, size, whole]),
        "fl_shm_culprit": (whole, [pointer]),
        "fl_shm_progress": (size, [pointer, number]),
        "fl_shm_is_missing": (number, [pointer, number]),
    }
    return load_library("libshm_collectives.so", functions)


def host_identity() -> bytes:
    """Return 32 bytes that identify the host. The bytes are equal for two processes only if these processes can share
    memory.

    The bytes depend on the boot of the kernel, on /dev/shm, and on the namespace of process ids.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    memory = MEMORY_DIR.stat()
    text = (
        f"{boot.read_text(encoding='ascii') if boot.exists() else os.uname().nodename} {memory.st_dev} "
        f"{memory.st_ino} {os.readlink('/proc/self/ns/pid')}"
    )
    return hashlib.sha256(text.encode()).digest()


def create_memory() -> tuple[int, str]:
    """Create an empty region that only this user can read. Returns (file descriptor, path for peers).

    The region has no name in a file system, so no file remains if a rank is killed before all ranks have opened the
    region. With named regions, one of 20 starts that were killed at random times left a file.
    """
    descriptor = os.open(MEMORY_DIR, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def open_memory(path: str) -> int:
    """Open a memory region that a peer has created. Returns its file descriptor. Raises OSError.

    The path comes from a peer, so it is checked before the file is opened for writing. Only a region without a name
    is accepted, and the process that holds the region must belong to this user.
    """
    match = _REGION.fullmatch(path)
    if match is None:
        raise PermissionError(errno.EPERM, "not a shared-memory region: expected a path /proc/PID/fd/NUMBER", path)
    where = os.open(path, os.O_PATH | os.O_CLOEXEC)  # O_PATH allows fstat, but no reading or writing
    try:
        status = os.fstat(where)
        process = os.stat(f"/proc/{match[1]}")
        if not stat.S_ISREG(status.st_mode) or status.st_nlink or status.st_dev != MEMORY_DIR.stat().st_dev:
            raise PermissionError(errno.EPERM, f"not a shared-memory region: not an unnamed file in {MEMORY_DIR}", path)
        if {status.st_uid, process.st_uid} != {os.getuid()} or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(errno.EPERM, "belongs to another user or is accessible to other users", path)
        return os.open(f"/proc/self/fd/{where}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(where)


def share_memory(process_group: Any, rank: int, size: int) -> tuple[int | None, str]:
    """Open one memory region on all ranks of a gloo group.

    Returns (descriptor, ''), or (None, reason) on all ranks if any rank cannot open the region. Collective over the
    group. First each rank sends the identity of its host, and rank 0 sends the path of its new region. Then each rank
    reports whether it could open the region.
    """
    descriptor = None
    path = ""
    reason = why_unavailable()
    if rank == 0 and not reason:
        try:
            descriptor, path = create_memory()
        except OSError as error:
            reason = f"{error.strerror} in {MEMORY_DIR}"
    mine = torch.zeros(160, dtype=torch.uint8)
    mine[:32] = torch.frombuffer(bytearray(host_identity() if not reason else b"-" * 32), dtype=torch.uint8)
    text = (path if rank == 0 else "").encode()
    mine[32 : 32 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine, group=process_group)
    together = all(torch.equal(other[:32], everyone[0][:32]) for other in everyone)
    path = bytes(everyone[0][32:].tolist()).rstrip(b"\0").decode(errors="replace")
    if together and path and rank != 0:
        try:
            descriptor = open_memory(path)
        except OSError as error:
            reason = f"{error.strerror}: {path}"
    able = torch.tensor([int(together and descriptor is not None)], dtype=torch.int32)
    dist.all_reduce(able, op=dist.ReduceOp.MIN, group=process_group)
    if able.item():
        return descriptor, ""
    if descriptor is not None:
        os.close(descriptor)
    return None, reason or ("another rank cannot open it" if together else "its ranks are on several hosts")
