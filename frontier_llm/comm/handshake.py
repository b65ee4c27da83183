"""Authenticates connections to the job's key-value store, so that only ranks of this job can use it.

Within a node, ranks use a Unix socket, and the kernel reports the user of the process at the other end. Between nodes,
each end answers a random challenge of the other end (HMAC-SHA256). The answers prove that both ends know the job's
secret, which is never sent. The data after the handshake is neither encrypted nor signed (docs/security.md).
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable

from frontier_llm import log

GREETING = b"frontier-llm rendezvous 1\n"
CHALLENGE_BYTES = PROOF_BYTES = 32
HANDSHAKE_S = 5.0  # time limit of a handshake; a rank needs only one round trip.
# Largest number of connections that are not authenticated yet. Additional connections are closed at once, and their
# ranks connect again.
MOST_UNKNOWN = 256
MOST_LINES = 20  # limit of log lines about unauthenticated peers


class UnauthenticatedPeer(Exception):
    """The peer failed authentication. The message contains the reason."""


def same_user(connection: socket.socket) -> None:
    """Raise UnauthenticatedPeer if the peer of a Unix socket belongs to another user."""
    process, user, _ = struct.unpack(
        "3i",
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")),
    )
    if user != os.getuid():
        raise UnauthenticatedPeer(f"process {process} belongs to another user (uid {user})")


def require_proof(connection: socket.socket, secret: bytes) -> None:
    """Run the server's part of the handshake.

    Raises UnauthenticatedPeer if the peer does not prove that it knows the secret.
    Raises OSError if the peer closes the connection or exceeds HANDSHAKE_S.
    """
    until_s = time.monotonic() + HANDSHAKE_S
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    connection.settimeout(HANDSHAKE_S)
    connection.sendall(GREETING + challenge)
    answer = _receive(connection, CHALLENGE_BYTES + PROOF_BYTES, until_s, GREETING)
    theirs = answer[:CHALLENGE_BYTES]
    proof = answer[CHALLENGE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"rank", challenge, theirs)):
        raise UnauthenticatedPeer("the peer does not have the job's secret")
    connection.sendall(_proof(secret, b"server", theirs, challenge))
    connection.settimeout(None)


def give_proof(connection: socket.socket, secret: bytes) -> None:
    """Run a rank's part of the handshake.

    Raises UnauthenticatedPeer if the server does not know the secret. Raises OSError if the server refuses this rank.
    """
    until_s = time.monotonic() + HANDSHAKE_S
    ours = secrets.token_bytes(CHALLENGE_BYTES)
    challenge = _receive(connection, CHALLENGE_BYTES, until_s, GREETING)
    connection.sendall(GREETING + ours + _proof(secret, b"rank", challenge, ours))
    if not hmac.compare_digest(_receive(connection, PROOF_BYTES, until_s), _proof(secret, b"server", ours, challenge)):
        raise UnauthenticatedPeer("the server at this address does not have the job's secret")
    connection.settimeout(None)


def exactly(connection: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes. Raises OSError if the peer closes the connection earlier."""
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise ConnectionError("the peer closed the connection")
        received += piece
    return bytes(received)


def _receive(connection: socket.socket, size: int, until_s: float, greeting: bytes = b"") -> bytes:
    """Receive `greeting` and then `size` bytes, which are returned. `until_s` is the deadline.

    Raises UnauthenticatedPeer at the first byte that differs from the greeting. A peer with another protocol may never
    send the remaining bytes, so this function does not wait for them.
    """
    received = b""
    while len(received) < len(greeting) + size:
        connection.settimeout(max(until_s - time.monotonic(), 0.001))
        piece = connection.recv(len(greeting) + size - len(received))
        if not piece:
            raise ConnectionError("the peer closed the connection")
        received += piece
        if not received.startswith(greeting[: len(received)]):
            raise UnauthenticatedPeer("the peer uses another protocol")
    return received[len(greeting) :]


def _proof(secret: bytes, role: bytes, *challenges: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(challenges), "sha256")


class Handshake:
    """Accepts connections on `listener`. If `admit` raises no exception, passes the connection to `serve`.

    Otherwise closes the connection and logs it. Each connection has its own thread until it is authenticated, so that a
    peer that sends nothing does not delay other peers.
    """

    def __init__(
        self,
        listener: socket.socket,
        admit: Callable[[socket.socket], None],
        serve: Callable[[socket.socket], None],
        where: str,
    ) -> None:
        self._listener = listener
        self._admit = admit
        self._serve = serve
        self._where = where
        self._unknown = threading.BoundedSemaphore(MOST_UNKNOWN)
        self._lines = 0
        threading.Thread(target=self._accept, name="store handshake", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections. Connections that were accepted before stay open."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            if not self._unknown.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(
                target=self._examine, args=(connection, address), name="store handshake", daemon=True
            ).start()

    def _examine(self, connection: socket.socket, address: object) -> None:
        who = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "this node"
        try:
            self._admit(connection)
        except (UnauthenticatedPeer, OSError) as error:
            connection.close()
            self._refused(who, "the peer sent nothing" if isinstance(error, TimeoutError) else str(error))
        else:
            self._serve(connection)
        finally:
            self._unknown.release()

    def _refused(self, who: str, why: str) -> None:
        self._lines += 1
        if self._lines <= MOST_LINES:
            last = "; further ones are refused without a message" if self._lines == MOST_LINES else ""
            log.warn(f"refused an unauthenticated connection to {self._where} from {who}: {why}{last}")
