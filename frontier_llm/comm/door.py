"""Who may speak to the job's store: ranks of this job, and nobody else.

Within a node the kernel says whose process is at the other end of a Unix socket. Between nodes both ends prove that
they know the job's secret, which is never sent: each answers the other's random challenge (HMAC-SHA256). What follows
on the connection is neither encrypted nor signed (docs/security.md).
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
HANDSHAKE_S = 5.0  # a rank answers within a round trip
# connections that have not yet said who they are: what more come are closed, and a rank's is tried again
MOST_UNKNOWN = 256
MOST_LINES = 20  # of the log, about strangers


class Stranger(Exception):
    """Whoever is at the other end is no rank of this job; the message says why."""


def same_user(connection: socket.socket) -> None:
    """Raise Stranger where a Unix socket's other end belongs to another user."""
    process, user, _ = struct.unpack(
        "3i",
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")),
    )
    if user != os.getuid():
        raise Stranger(f"process {process} belongs to another user (uid {user})")


def require_proof(connection: socket.socket, secret: bytes) -> None:
    """The server's half of a handshake. Raises Stranger, or OSError when the other end leaves or takes too long."""
    until_s = time.monotonic() + HANDSHAKE_S
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    connection.settimeout(HANDSHAKE_S)
    connection.sendall(GREETING + challenge)
    answer = _receive(connection, CHALLENGE_BYTES + PROOF_BYTES, until_s, GREETING)
    theirs = answer[:CHALLENGE_BYTES]
    proof = answer[CHALLENGE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"rank", challenge, theirs)):
        raise Stranger("it does not know the job's secret")
    connection.sendall(_proof(secret, b"server", theirs, challenge))
    connection.settimeout(None)


def give_proof(connection: socket.socket, secret: bytes) -> None:
    """A rank's half. Raises Stranger where the server does not know the secret either; OSError where it takes us for
    a stranger.
    """
    until_s = time.monotonic() + HANDSHAKE_S
    ours = secrets.token_bytes(CHALLENGE_BYTES)
    challenge = _receive(connection, CHALLENGE_BYTES, until_s, GREETING)
    connection.sendall(GREETING + ours + _proof(secret, b"rank", challenge, ours))
    if not hmac.compare_digest(_receive(connection, PROOF_BYTES, until_s), _proof(secret, b"server", ours, challenge)):
        raise Stranger("who listens there does not know the job's secret")
    connection.settimeout(None)


def exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises OSError when the other end is gone before."""
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise ConnectionError("closed by the other side")
        received += piece
    return bytes(received)


def _receive(connection: socket.socket, size: int, until_s: float, greeting: bytes = b"") -> bytes:
    """So many bytes after the greeting, by then, however they come. A stranger's first bytes give it away: no need
    to wait for as many as a rank sends.
    """
    received = b""
    while len(received) < len(greeting) + size:
        connection.settimeout(max(until_s - time.monotonic(), 0.001))
        piece = connection.recv(len(greeting) + size - len(received))
        if not piece:
            raise ConnectionError("closed by the other side")
        received += piece
        if not received.startswith(greeting[: len(received)]):
            raise Stranger("it does not speak the protocol of this rendezvous")
    return received[len(greeting) :]


def _proof(secret: bytes, role: bytes, *challenges: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(challenges), "sha256")


class Door:
    """Accepts connections of `listener`; hands those that `admit` lets pass to `serve`, and closes and logs the others.

    A thread for each while it is unknown: one that says nothing holds up nobody.
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
        threading.Thread(target=self._accept, name="store door", daemon=True).start()

    def close(self) -> None:
        """Take no more; those that are in are served on."""
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
            threading.Thread(target=self._examine, args=(connection, address), name="store door", daemon=True).start()

    def _examine(self, connection: socket.socket, address: object) -> None:
        who = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "this node"
        try:
            self._admit(connection)
        except (Stranger, OSError) as error:
            connection.close()
            self._refused(who, "it said nothing" if isinstance(error, TimeoutError) else str(error))
        else:
            self._serve(connection)
        finally:
            self._unknown.release()

    def _refused(self, who: str, why: str) -> None:
        self._lines += 1
        if self._lines <= MOST_LINES:
            last = "; further ones are refused without a line" if self._lines == MOST_LINES else ""
            log.warn(f"refused a stranger at {self._where}, from {who}: {why}{last}")
