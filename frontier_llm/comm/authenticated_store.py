"""Client and server of the authenticated store. The server runs in rank 0's process.

Ranks on rank 0's node connect over a Unix socket, the other ranks over TCP (`comm.handshake`).
The Unix socket is in the abstract namespace, so it leaves no file. Only ranks of the job can compute its name.
Concurrent requests use different connections, so that one thread can wait for a key while another thread writes.

The server receives connections that `comm.handshake` has already authenticated, and does not listen on a socket itself.
The server is one C++ thread (csrc/store_server.cpp) that needs no interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from frontier_llm.comm.handshake import UnauthenticatedPeer, exactly, give_proof, same_user
from frontier_llm.libraries import load_library

# Time limit for replies that the server can send at once. After this time the server counts as stopped or gone.
ANSWER_S = 30.0
CONNECT_S = 10.0  # Time limit for one attempt to connect.
# Limits of a message, the same as in csrc/store_server.cpp. The largest requests have some hundred parts: for a
# communicator over the complete machine, RCCL reads the ids of all root ranks in one request.
MOST_PARTS = 1 << 16
MOST_BYTES = 64 << 20

Parts = list[bytes]
# Connects to the server. Raises OSError if no server listens yet, UnauthenticatedPeer if authentication fails.
Connect = Callable[[], socket.socket]


def socket_name(secret: bytes, port: int, first_local_rank: int) -> str:
    """Return the name of a node's Unix socket in the abstract namespace. It is unique per job and node.

    Other users cannot take the name first, because it is derived from the secret.
    """
    return "\0frontier-llm-" + hmac.digest(secret, f"{port} {first_local_rank}".encode(), "sha256").hex()[:40]


def connect_here(name: str) -> socket.socket:
    """Connect to a process on this node by the name of its Unix socket.

    Raises OSError, or UnauthenticatedPeer if the process belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(name)
        same_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_across(address: str, port: int, secret: bytes) -> socket.socket:
    """Connect to the server in rank 0's process on another node.

    Raises OSError, or UnauthenticatedPeer if rank 0's process does not have the secret.
    """
    connection = socket.create_connection((address, port), timeout=CONNECT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        give_proof(connection, secret)
    except BaseException:
        connection.close()
        raise
    return connection


def send_parts(connection: socket.socket, *parts: bytes) -> None:
    """Send a list of byte strings as one message. The peer reads it with `receive_parts`."""
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    connection.sendall(lengths + b"".join(parts))


def receive_parts(connection: socket.socket) -> Parts:
    """Receive a list of byte strings. Raises OSError if the peer is gone or its message is empty or too large."""
    (count,) = struct.unpack("<I", exactly(connection, 4))
    if not 0 < count <= MOST_PARTS:
        raise ConnectionError(f"received a message of {count} parts, expected 1 to {MOST_PARTS}")
    lengths = struct.unpack(f"<{count}Q", exactly(connection, 8 * count))
    if sum(lengths) > MOST_BYTES:
        raise ConnectionError(f"received a message of {sum(lengths)} bytes, expected at most {MOST_BYTES}")
    return [exactly(connection, length) for length in lengths]


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class AuthenticatedStore(dist.Store):
    """A rank's client of the job's store. Methods raise DistStoreError if the server is gone.

    torch's C++ code (PrefixStore, gloo, RCCL's groups and their watchdogs) calls methods of this Python class. It calls
    some of them by names that torch's Python interface does not have. This class defines all methods that C++ can call.
    It has no queues and no list_keys, because C++ cannot call them on a Python store, and no group needs them.
    """

    def __init__(self, connect: Connect, timeout_s: float, patient: bool = True, connections: int = 1000) -> None:
        """Connect to the server. With `patient`, retry for up to `timeout_s`.

        At most `connections` requests run at the same time. With one connection, a thread that waits for a key blocks
        the requests of all other threads.
        """
        super().__init__()
        # The C++ base class stores the time-out, because torch's process groups and PrefixStore also set it there.
        self.set_timeout(timedelta(seconds=timeout_s))
        self._connect = connect
        self._room = threading.BoundedSemaphore(connections)
        # All threads share the idle connections. A connection per thread would not be reused, because Python treats a
        # C++ thread as a new thread at each call.
        self._idle: list[socket.socket] = []
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self._idle.append(connect())
                return
            except (OSError, UnauthenticatedPeer) as error:
                if not patient or time.monotonic() > deadline_s:
                    raise dist.DistStoreError(
                        f"cannot connect to the job's store within {timeout_s if patient else 0:g} s: {error}"
                    ) from error
                time.sleep(0.01)

    def _ask(self, operation: str, *arguments: bytes, within_s: float = 0.0) -> Parts:
        """Send a request and return the values in the reply.

        The time limit for the reply is `within_s` + ANSWER_S seconds.
        """
        with self._room:
            try:
                connection = self._idle.pop() if self._idle else self._connect()
                connection.settimeout(within_s + ANSWER_S)
                send_parts(connection, operation.encode(), *arguments)
                # A connection that fails is not used again, because a late reply would be read as the reply to the next
                # request.
                status, *values = receive_parts(connection)
            except (OSError, UnauthenticatedPeer) as error:
                raise dist.DistStoreError(f"lost the connection to the job's store: {error}") from error
            self._idle.append(connection)
        if status != b"ok":
            raise dist.DistStoreError(values[0].decode(errors="replace"))
        return values

    def _await(self, operation: str, keys: list[str], timeout: timedelta | None = None) -> Parts:
        timeout_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]  # missing in the stubs
        return self._ask(operation, repr(timeout_s).encode(), *(key.encode() for key in keys), within_s=timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        """Store `value` under `key`, as torch.distributed.Store does."""
        self._ask("set", key.encode(), _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for the key and return its value."""
        return self._await("get", [key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number stored under `key` and return the sum."""
        return int(self._ask("add", key.encode(), str(amount).encode())[0])

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""
        return bool(self._ask("check", *(key.encode() for key in keys))[0])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._await("wait", keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for all keys and return their values.

        For a communicator of more than 128 ranks, RCCL calls this method to read the ids of all roots.
        """
        return self._await("multi_get", keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store `desired` if the current value is `expected`. Returns the value that is stored afterwards.

        A key that does not exist counts as the value ''.
        """
        return self._ask("compare_set", key.encode(), _as_bytes(expected), _as_bytes(desired))[0]

    def delete_key(self, key: str) -> bool:
        """Delete a key. Returns True if the key existed."""
        return bool(self._ask("delete_key", key.encode())[0])

    def num_keys(self) -> int:
        """Return the number of keys in the store, whatever their prefix."""
        return int(self._ask("num_keys")[0])

    def clone(self) -> AuthenticatedStore:
        """Return this store. Threads can share it, because concurrent requests use different connections."""
        return self

    # torch's C++ code calls these two methods by other names
    deleteKey = delete_key
    getNumKeys = num_keys


@functools.cache
def _library() -> ctypes.CDLL:
    store = ctypes.c_void_p
    functions: dict[str, tuple[Any, list[Any]]] = {
        "fl_store_open": (store, []),
        "fl_store_serve": (None, [store, ctypes.c_int]),
        "fl_store_close": (None, [store]),
    }
    return load_library("libstore_server.so", functions)


class NativeServer:
    """The server of the authenticated store. It replies to requests on its connections until `close` is called."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._server = library.fl_store_open()

    def serve(self, connection: socket.socket) -> None:
        """Reply to all requests on this connection from now on."""
        if self._server is None:
            connection.close()
        else:
            self._library.fl_store_serve(self._server, connection.detach())

    def close(self) -> None:
        """End all connections."""
        server = self._server
        self._server = None
        if server is not None:
            self._library.fl_store_close(server)


def open_server() -> tuple[Callable[[socket.socket], None], Callable[[], None]]:
    """Open a new, empty store. Returns (function that serves a connection, function that closes the store).

    Raises BackendError if the server has not been built.
    """
    server = NativeServer(_library())
    return server.serve, server.close
