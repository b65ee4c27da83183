"""Rendezvous of a job's ranks: the key-value store, and how a rank connects to it.

There are two kinds of store.
`torch` is torch's TCPStore. Its server runs in its own process on rank 0's node (`comm.store_process`), so it continues
if rank 0 is frozen or killed. It does not authenticate its clients (docs/security.md).
`authenticated` is this package's server in rank 0's process (`comm.authenticated_store`), which only ranks of this job
can use (`comm.handshake`). torch's C++ threads call its client through Python, so they wait for the interpreter lock.
"""

from __future__ import annotations

import functools
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from frontier_llm.comm.authenticated_store import (
    ANSWER_S,
    AuthenticatedStore,
    Connect,
    connect_across,
    connect_here,
    open_server,
    socket_name,
)
from frontier_llm.comm.handshake import Handshake, require_proof, same_user
from frontier_llm.comm.store_launch import StoreProcess
from frontier_llm.comm.store_process import JOB_KEY, raise_open_file_limit
from frontier_llm.errors import BackendError
from frontier_llm.files import write_atomically
from frontier_llm.run.launchers import STORE_CONNECTIONS
from frontier_llm.run.threads import in_daemon

RETRY_S = 0.02  # time between two attempts to connect to a store that does not listen yet
LOOPBACK = "127.0.0.1"

StoreKind = Literal["torch", "authenticated"]


@dataclass(frozen=True)
class Meeting:
    """Address of a job's rendezvous, the secret of its ranks, and this rank's node."""

    address: str  # Address of rank 0's node.
    port: int  # Port of the store. TCPStore does not use it if all ranks are on one node and have a `folder`.
    first: int  # Global rank of this node's first rank.
    per_node: int  # Number of ranks on each node.
    # Returns the secret; called at each attempt to connect; the secret may be empty if all ranks are on one node
    secret: Callable[[], bytes] = field(default=bytes, repr=False)
    store: StoreKind = "torch"
    folder: Callable[[], Path] | None = None  # private folder of this job on this node; called at each attempt


@dataclass(frozen=True)
class _Joined:
    """The store to which this rank is connected.

    The object holds a reference to a store that is written in Python, because torch holds a reference only to the C++
    part of such a store.
    """

    store: dist.Store
    reopen: Callable[[float], dist.Store]  # returns another connection to the store, with this time-out in seconds
    address: tuple[str, int] | None  # host and port of TCPStore; None for the authenticated store


_closing: list[Callable[[], None]] = []
_joined: list[_Joined] = []
_starting: list[StoreProcess] = []


def start_store(rank: int, world_size: int, meeting: Meeting, timeout_s: float) -> None:
    """On rank 0, start the process that serves TCPStore, and return at once.

    The process loads torch while rank 0 continues.

    Raises OSError if the port is taken.
    """
    if rank != 0 or meeting.store != "torch" or _starting:
        return
    if _has_free_choice_of_port(world_size, meeting):
        listener = _listen(LOOPBACK, 0)
    else:
        listener = _listen(meeting.address, meeting.port)
    with listener:
        process = StoreProcess(
            listener, STORE_CONNECTIONS * world_size, _token(meeting), longest_s=max(60.0, 2 * timeout_s)
        )
    _starting.append(process)
    _closing.append(process.let_go)


def join_store(rank: int, world_size: int, meeting: Meeting, timeout_s: float) -> dist.Store:
    """Connect to the job's store. Rank 0 first starts the server.

    Raises BackendError if the server may not open enough files, RuntimeError or OSError if the store cannot be reached
    in time.
    """
    join = _join_torch if meeting.store == "torch" else _join_authenticated
    _joined.append(join(rank, world_size, meeting, timeout_s))
    return _joined[-1].store


def open_store(timeout_s: float) -> dist.Store:
    """Return another connection to the store that this rank has joined, with its own time-out."""
    return _joined[-1].reopen(timeout_s)


def has_joined() -> bool:
    """Return True if this rank is connected to a store. A single process and ranks under MPI have no store."""
    return bool(_joined)


def store_address() -> tuple[str, int] | None:
    """Return host and port of the TCPStore of this rank. None without a store and with another kind of store."""
    return _joined[-1].address if _joined else None


def forget_stores() -> None:
    """Close this rank's connections to the store, and on rank 0 the server.

    Call this function after the groups are destroyed.
    """
    _joined.clear()
    _starting.clear()
    while _closing:
        _closing.pop()()


def limit_answer_time() -> None:
    """Set a time limit for replies on all TCPStore connections of this process, including connections that torch
    opened.

    torch has no time limit for requests to which the server replies at once. This function sets a socket option for
    time-outs, so that such a request fails with "Socket Timeout".
    """
    address = store_address()
    if address is None:
        return
    peers = {(_plain(entry[4][0]), address[1]) for entry in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)}
    limit = struct.pack("ll", int(ANSWER_S), 0)
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # raised if another thread has closed the socket, or if the socket is not connected
            connection = socket.socket(fileno=int(entry))
            try:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    host, port = connection.getpeername()[:2]
                    if (_plain(host), port) in peers:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            finally:
                connection.detach()


def _plain(host: object) -> str:
    return str(host).removeprefix("::ffff:")


def _token(meeting: Meeting) -> str:
    return hmac.digest(meeting.secret() or b"no secret", b"store", "sha256").hex()


def _has_free_choice_of_port(world_size: int, meeting: Meeting) -> bool:
    return meeting.folder is not None and world_size <= meeting.per_node


def _port_file(folder: Path) -> Path:
    return folder / "store-port"


def _join_torch(rank: int, world_size: int, meeting: Meeting, timeout_s: float) -> _Joined:
    deadline_s = time.monotonic() + timeout_s
    if rank == 0:
        start_store(rank, world_size, meeting, timeout_s)
        port = _starting[-1].wait_until_ready(timeout_s)
        if _has_free_choice_of_port(world_size, meeting):
            assert meeting.folder is not None
            _write_port(_port_file(meeting.folder()), port)
    while True:
        try:
            address = _store_address(world_size, meeting)
            # Test the address with a plain connection, because TCPStore's client pauses for a second between attempts.
            socket.create_connection(address, timeout=ANSWER_S).close()
            store = _connect_torch(address, timeout_s)
            _check_token(store, meeting, deadline_s)
            return _Joined(store, functools.partial(_connect_torch, address), address)
        except (OSError, ValueError, dist.DistStoreError) as error:
            if time.monotonic() > deadline_s:
                raise dist.DistStoreError(
                    f"cannot connect to the job's store within {timeout_s:g} s: {error}"
                ) from error
            time.sleep(RETRY_S)


def _write_port(path: Path, port: int) -> None:
    write_atomically(path, str(port))


def _store_address(world_size: int, meeting: Meeting) -> tuple[str, int]:
    """Return host and port of TCPStore. Raises OSError or ValueError until rank 0 has written the chosen port."""
    if not _has_free_choice_of_port(world_size, meeting):
        return meeting.address, meeting.port
    assert meeting.folder is not None
    return LOOPBACK, int(_port_file(meeting.folder()).read_text(encoding="ascii"))


def _connect_torch(address: tuple[str, int], timeout_s: float) -> dist.Store:
    """Return a client of TCPStore. Raises DistStoreError if the server does not reply within `timeout_s`."""
    host, port = address
    timeout = timedelta(seconds=timeout_s)
    connecting = in_daemon(
        lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout),
        "store connection",
    )
    try:
        return connecting.result(timeout_s)
    except TimeoutError:
        raise dist.DistStoreError(
            f"{host}:{port} does not respond as torch's TCPStore within {timeout_s:g} s"
        ) from None


def _check_token(store: dist.Store, meeting: Meeting, deadline_s: float) -> None:
    """Raise DistStoreError if the store belongs to another job. This can happen if two jobs derive the same port."""
    store.wait([JOB_KEY], timedelta(seconds=max(deadline_s - time.monotonic(), 0.1)))
    if store.get(JOB_KEY).decode() != _token(meeting):
        raise dist.DistStoreError("the store at this address belongs to another job")


def _join_authenticated(rank: int, world_size: int, meeting: Meeting, timeout_s: float) -> _Joined:
    if rank == 0:
        problem = raise_open_file_limit(STORE_CONNECTIONS * world_size)
        if problem is not None:
            raise BackendError(
                f"rank 0: {problem}",
                "ask the site to raise the hard limit of open files (ulimit -Hn), or set comm.store=torch",
                "comm.store",
            )
        serve, close = open_server()
        _closing.append(close)
        _open_here(meeting, serve)
        if world_size > meeting.per_node:
            listener = _listen(meeting.address, meeting.port)
            _closing.append(
                Handshake(listener, lambda peer: _admit(peer, meeting.secret()), serve, "the rendezvous").close
            )
    connect: Connect = functools.partial(_here if meeting.first == 0 else _across, meeting)
    store = AuthenticatedStore(connect, timeout_s)
    return _Joined(store, lambda limit_s: AuthenticatedStore(connect, limit_s, patient=False), None)


def _here(meeting: Meeting) -> socket.socket:
    return connect_here(socket_name(meeting.secret(), meeting.port, meeting.first))


def _across(meeting: Meeting) -> socket.socket:
    return connect_across(meeting.address, meeting.port, meeting.secret())


def _admit(peer: socket.socket, secret: bytes) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    require_proof(peer, secret)


def _open_here(meeting: Meeting, serve: Callable[[socket.socket], None]) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_name(meeting.secret(), meeting.port, meeting.first))
    listener.listen(socket.SOMAXCONN)
    _closing.append(Handshake(listener, same_user, serve, "the rendezvous of this node").close)


def _listen(address: str, port: int) -> socket.socket:
    """Listen on the network interface of `address`.

    Some hosts map their own name to loopback (Debian's 127.0.1.1). The interface that other nodes use is then not
    known, so the socket listens on all interfaces.
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    is_hidden = str(where[0]).startswith("127.") and address not in ("localhost", LOOPBACK)
    return socket.create_server(("", port) if is_hidden else where[:2], family=family, backlog=socket.SOMAXCONN)
