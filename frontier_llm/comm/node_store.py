"""The job's key-value store as the ranks of a node see it that share one connection, through the relay (`comm.relay`) in their first one.

The store is one server, on rank 0. With a connection (and one more for the notice board) per rank it holds 150,000 sockets at 75,000
ranks, more than a process may open on most systems; with a relay per node it holds 9,400. Clients reach it by
a Unix socket of the abstract namespace (no file to clean up), and both ends refuse a peer of another user.
Every thread of a client has a connection of its own: one may wait for a key while another posts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading
import time
from datetime import timedelta

import torch.distributed as dist

ANSWER_S = 30.0  # for a relay to answer what needs no waiting: then it is stopped or gone

Parts = list[bytes]


def relay_name(address: str, port: int, first_local_rank: int) -> str:
    """Abstract socket name of a node's relay: one per job and node (and per pretended node of a test)."""
    job = hashlib.sha256(f"{address}:{port}:{os.getuid()}".encode()).hexdigest()[:20]
    return f"\0frontier-llm-{job}-{first_local_rank}"


def open_store(address: str, port: int, timeout_s: float, first_local_rank: int | None = None) -> dist.Store:
    """Another connection to the store that `comm.connect` has joined: through the relay of the node, if it has one."""
    if first_local_rank is not None:
        with contextlib.suppress(OSError):
            return NodeStore(relay_name(address, port, first_local_rank), timeout_s, patient=False)
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def send_parts(connection: socket.socket, *parts: bytes) -> None:
    """What `receive_parts` gives at the other end."""
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    connection.sendall(lengths + b"".join(parts))


def receive_parts(connection: socket.socket) -> Parts:
    """Raises OSError when the other end is gone."""
    (count,) = struct.unpack("<I", _exactly(connection, 4))
    return [_exactly(connection, length) for length in struct.unpack(f"<{count}Q", _exactly(connection, 8 * count))]


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise ConnectionError("closed by the other side")
        received += piece
    return bytes(received)


def is_own_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this one's user."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.getuid()


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class NodeStore(dist.Store):
    """The job's store as a rank sees it through its node's relay. Raises DistStoreError when relay or server are gone.

    torch's C++ (prefixes, gloo, RCCL's groups and their watchdogs) calls a store that is written in Python by names of its own, some of them
    not Python's: every one that it can call is here. Queues and list_keys it cannot call, and no group needs them.
    """

    def __init__(self, name: str, timeout_s: float, patient: bool = True) -> None:
        """Connect; if `patient`, wait up to `timeout_s` for the relay to be there, else raise OSError when it is not."""
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))  # kept by the C++ half, which hears of it from groups and prefixes too
        self._name, self._threads = name, threading.local()
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self._connection()
                return
            except ConnectionRefusedError as error:
                if not patient:
                    raise
                if time.monotonic() > deadline_s:
                    raise dist.DistStoreError(f"no store relay on this node within {timeout_s:g} s") from error
                time.sleep(0.01)

    def _connection(self) -> socket.socket:
        connection: socket.socket | None = getattr(self._threads, "connection", None)
        if connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(self._name)
            if not is_own_user(connection):
                raise dist.DistStoreError("the store relay of this node belongs to another user")
            self._threads.connection = connection
        return connection

    def _ask(self, operation: str, *arguments: bytes, within_s: float = 0.0) -> Parts:
        """`within_s` is what the relay itself may wait."""
        try:
            connection = self._connection()
            connection.settimeout(within_s + ANSWER_S)
            send_parts(connection, operation.encode(), *arguments)
            status, *values = receive_parts(connection)
        except OSError as error:
            self._threads.connection = None  # an answer that comes late must not be taken for the next one's
            raise dist.DistStoreError(f"the store relay of this node is gone: {error}") from error
        if status != b"ok":
            raise dist.DistStoreError(values[0].decode())
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

    def clone(self) -> NodeStore:
        """For another thread: this one, since each has a connection of its own."""
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # the names by which torch's C++ calls them
