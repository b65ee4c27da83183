"""A rank's view of the authenticated store: connections to the server in rank 0's process (`comm.store_server`).

Ranks of rank 0's node connect over a Unix socket, the others over TCP (`comm.door`).
Unix sockets are of the abstract namespace (no file to clean up), under a name that only the job can know.
Each question takes a connection of its own, so that one thread may wait for a key while another posts.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from frontier_llm.comm.door import Stranger, exactly, give_proof, same_user

ANSWER_S = 30.0  # for the other end to answer what needs no waiting: then it is stopped or gone
CONNECT_S = 10.0  # for a network's answer to one attempt
# of a message, as in csrc/store_server.cpp; one of all of a machine's ids has some hundred
MOST_PARTS = 1 << 16
MOST_BYTES = 64 << 20

Parts = list[bytes]
Connect = Callable[[], socket.socket]  # raises OSError where nobody is there yet, Stranger where it is somebody else


def socket_name(secret: bytes, port: int, first_local_rank: int) -> str:
    """Abstract name of the Unix socket of a node: nobody else can take it beforehand. One per job and node (and per
    pretended node of a test).
    """
    return "\0frontier-llm-" + hmac.digest(secret, f"{port} {first_local_rank}".encode(), "sha256").hex()[:40]


def connect_here(name: str) -> socket.socket:
    """To a process of this user on this node."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(name)
        same_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_across(address: str, port: int, secret: bytes) -> socket.socket:
    """To rank 0's process on another node."""
    connection = socket.create_connection((address, port), timeout=CONNECT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        give_proof(connection, secret)
    except BaseException:
        connection.close()
        raise
    return connection


def send_parts(connection: socket.socket, *parts: bytes) -> None:
    """What `receive_parts` gives at the other end."""
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    connection.sendall(lengths + b"".join(parts))


def receive_parts(connection: socket.socket) -> Parts:
    """Raises OSError when the other end is gone, or says what no rank says."""
    (count,) = struct.unpack("<I", exactly(connection, 4))
    if not 0 < count <= MOST_PARTS:
        raise ConnectionError(f"a message of {count} parts")
    lengths = struct.unpack(f"<{count}Q", exactly(connection, 8 * count))
    if sum(lengths) > MOST_BYTES:
        raise ConnectionError(f"a message of {sum(lengths)} bytes")
    return [exactly(connection, length) for length in lengths]


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class AuthenticatedStore(dist.Store):
    """The job's store as a rank sees it. Raises DistStoreError when the other end is gone.

    torch's C++ (prefixes, gloo, RCCL's groups and their watchdogs) calls a store that is written in Python by names of
    its own, some of them not Python's: every one that it can call is here. Queues and list_keys it cannot call, and no
    group needs them.
    """

    def __init__(self, connect: Connect, timeout_s: float, patient: bool = True, connections: int = 1000) -> None:
        """Connect; if `patient`, try for up to `timeout_s`. At most `connections` at a time: with one, nobody may
        wait for a key.
        """
        super().__init__()
        # kept by the C++ half, which hears of it from groups and prefixes too
        self.set_timeout(timedelta(seconds=timeout_s))
        self._connect = connect
        self._room = threading.BoundedSemaphore(connections)
        self._idle: list[socket.socket] = []  # not one per thread: a thread of C++ is a new one to Python at each call
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self._idle.append(connect())
                return
            except (OSError, Stranger) as error:
                if not patient or time.monotonic() > deadline_s:
                    raise dist.DistStoreError(
                        f"no store of this job within {timeout_s if patient else 0:g} s: {error}"
                    ) from error
                time.sleep(0.01)

    def _ask(self, operation: str, *arguments: bytes, within_s: float = 0.0) -> Parts:
        """`within_s` is what the other end itself may wait."""
        with self._room:
            try:
                connection = self._idle.pop() if self._idle else self._connect()
                connection.settimeout(within_s + ANSWER_S)
                send_parts(connection, operation.encode(), *arguments)
                # who fails here is not asked again: a late answer would be the next question's
                status, *values = receive_parts(connection)
            except (OSError, Stranger) as error:
                raise dist.DistStoreError(f"the store of this job is gone: {error}") from error
            self._idle.append(connection)
        if status != b"ok":
            raise dist.DistStoreError(values[0].decode(errors="replace"))
        return values

    def _await(self, operation: str, keys: list[str], timeout: timedelta | None = None) -> Parts:
        timeout_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]  # missing in the stubs
        return self._ask(operation, repr(timeout_s).encode(), *(key.encode() for key in keys), within_s=timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        """See torch.distributed.Store; so for the others."""
        self._ask("set", key.encode(), _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for the key."""
        return self._await("get", [key])[0]

    def add(self, key: str, amount: int) -> int:
        """The new value."""
        return int(self._ask("add", key.encode(), str(amount).encode())[0])

    def check(self, keys: list[str]) -> bool:
        """True when all are there."""
        return bool(self._ask("check", *(key.encode() for key in keys))[0])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are there."""
        self._await("wait", keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Waits for all; RCCL asks so for the ids of all roots of a communicator of more than 128 ranks."""
        return self._await("multi_get", keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """The value afterwards."""
        return self._ask("compare_set", key.encode(), _as_bytes(expected), _as_bytes(desired))[0]

    def delete_key(self, key: str) -> bool:
        """True when it was there."""
        return bool(self._ask("delete_key", key.encode())[0])

    def num_keys(self) -> int:
        """In the whole store."""
        return int(self._ask("num_keys")[0])

    def clone(self) -> AuthenticatedStore:
        """For another thread: this one, since each question has a connection of its own."""
        return self

    # the names by which torch's C++ calls them
    deleteKey = delete_key
    getNumKeys = num_keys
