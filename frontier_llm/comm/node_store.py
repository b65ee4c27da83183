"""One connection to the job's key-value store per node: the ranks of a node share that of their first one, through a relay in it.

The store is one server, on rank 0. With a connection (and one more for the notice board) per rank it holds 150,000 sockets at 75,000
ranks, more than a process may open on most systems; with a relay per node it holds 9,400. The relay is a thread for each local client; clients reach it by
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

FIRST_POLL_S, LONGEST_POLL_S = 0.001, 0.1  # of a key that is waited for; the pause doubles
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


def _send(connection: socket.socket, *parts: bytes) -> None:
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    connection.sendall(lengths + b"".join(parts))


def _receive(connection: socket.socket) -> Parts:
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


def _is_own_user(connection: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.getuid()


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class Relay:
    """Serves the other ranks of a node from `upstream`; its threads end with the process, or with `close`."""

    def __init__(self, upstream: dist.Store, name: str) -> None:
        self._upstream = upstream
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(name)
        self._listener.listen(128)
        threading.Thread(target=self._accept, name="store relay", daemon=True).start()

    def close(self) -> None:
        """Take no more clients; the name is free again. Those that are connected are served on."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if _is_own_user(connection):
                threading.Thread(target=self._serve, args=(connection,), name="store relay client", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while True:
                try:
                    operation, *arguments = _receive(connection)
                except OSError:
                    return
                try:
                    reply = b"ok", *self._answer(operation.decode(), arguments)
                except RuntimeError as error:  # DistStoreError is one: a time-out, or the server is gone
                    reply = b"error", str(error).encode()
                try:
                    _send(connection, *reply)
                except OSError:
                    return

    def _answer(self, operation: str, arguments: Parts) -> Parts:
        store, keys = self._upstream, [argument.decode(errors="replace") for argument in arguments]  # values need not be text
        match operation:
            case "set":
                store.set(keys[0], arguments[1])  # type: ignore[arg-type]  # bytes are accepted, and kept as they are
                return []
            case "add":
                return [str(store.add(keys[0], int(arguments[1]))).encode()]
            case "check":
                return [b"1" if store.check(keys) else b""]
            case "wait":
                self._await(keys[1:], float(arguments[0]))
                return []
            case "get":
                self._await(keys[1:], float(arguments[0]))
                return [store.get(keys[1])]
            case "compare_set":
                return [store.compare_set(keys[0], arguments[1], arguments[2])]  # type: ignore[arg-type]
            case "delete_key":
                return [b"1" if store.delete_key(keys[0]) else b""]
            case "num_keys":
                return [str(store.num_keys()).encode()]
            case "multi_get":
                self._await(keys[1:], float(arguments[0]))
                return [*store.multi_get(keys[1:])]
            case _:
                raise RuntimeError(f"the store relay does not know {operation!r}")

    def _await(self, keys: list[str], timeout_s: float) -> None:
        """By asking: a wait of the shared connection would hold up every other rank of the node."""
        deadline_s, pause_s = time.monotonic() + timeout_s, FIRST_POLL_S
        while not self._upstream.check(keys):
            if time.monotonic() > deadline_s:
                raise dist.DistStoreError(f"wait timeout after {timeout_s:g} s, keys: {', '.join(keys)}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)


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
            if not _is_own_user(connection):
                raise dist.DistStoreError("the store relay of this node belongs to another user")
            self._threads.connection = connection
        return connection

    def _ask(self, operation: str, *arguments: bytes, within_s: float = 0.0) -> Parts:
        """`within_s` is what the relay itself may wait."""
        try:
            connection = self._connection()
            connection.settimeout(within_s + ANSWER_S)
            _send(connection, operation.encode(), *arguments)
            status, *values = _receive(connection)
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
