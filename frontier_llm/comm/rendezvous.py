"""Where the ranks of a job meet: the key-value store in rank 0's process, and how a rank gets to it."""

from __future__ import annotations

import functools
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from frontier_llm.comm.door import Door, require_proof, same_user
from frontier_llm.comm.node_store import Connect, NodeStore, connect_across, connect_here, socket_name
from frontier_llm.comm.relay import Relay
from frontier_llm.comm.store_server import open_server
from frontier_llm.errors import BackendError

OWN_FILES = 1024  # what a rank opens besides: data, libraries, logs
CONNECTIONS = 3  # of a rank: its groups, its notice board, and RCCL's watchdog


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a job meet, what they know each other by, and this rank's node."""

    address: str  # of rank 0's node
    port: int
    first: int  # global rank of this node's first rank
    per_node: int
    secret: Callable[[], bytes] = field(
        default=bytes, repr=False
    )  # asked at each attempt; of one node, whose kernel knows users, it may be empty
    relayed: bool = False  # the ranks of a node share one connection


_closing: list[Callable[[], None]] = []
_joined: list[tuple[Connect, NodeStore]] = []  # torch keeps only the C++ half of a store that is written in Python


def join_store(rank: int, world_size: int, meeting: Meeting, timeout_s: float) -> dist.Store:
    """A rank's view of the store; rank 0 opens it, and the first rank of a node its relay where there are relays.

    Raises BackendError when rank 0 may not open enough files, RuntimeError or OSError when the store is not reached.
    """
    nodes = -(-world_size // meeting.per_node)
    if rank == 0:
        allow_connections(nodes if meeting.relayed else CONNECTIONS * world_size)
        serve, close = open_server()
        _closing.append(close)
        _open_here(meeting, serve)
        if nodes > 1:
            door = Door(_listen(meeting.address, meeting.port), lambda peer: _admit(peer, meeting.secret()), serve, "the rendezvous")
            _closing.append(door.close)
    elif meeting.relayed and rank == meeting.first:
        uplink = NodeStore(functools.partial(_across, meeting), timeout_s, connections=1)
        _open_here(meeting, Relay(uplink, nodes).serve)
    near = meeting.relayed or meeting.first == 0
    connect = functools.partial(_here if near else _across, meeting)
    _joined.append((connect, NodeStore(connect, timeout_s)))
    return _joined[-1][1]


def open_store(timeout_s: float) -> dist.Store:
    """Another view of the store that this rank has joined, with a time-out of its own."""
    return NodeStore(_joined[-1][0], timeout_s, patient=False)


def has_joined() -> bool:
    """Whether this rank has a store: alone, or under MPI, it has none."""
    return bool(_joined)


def forget_stores() -> None:
    """After the groups have gone."""
    while _closing:
        _closing.pop()()
    _joined.clear()


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
    _closing.append(Door(listener, same_user, serve, "the rendezvous of this node").close)


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files to what the store's clients need."""
    needed = count + OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise BackendError(
            f"rank 0 may open {hard} files, but {count} connections to its store will come",
            "set comm.store=node (one connection per node), or have the hard limit raised (ulimit -Hn)",
            "comm.store",
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _listen(address: str, port: int) -> socket.socket:
    """For the ranks of other nodes, on the interface that the job uses.

    A host whose own table maps its name to loopback (Debian's 127.0.1.1) cannot know that interface and listens on all.
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    hidden = str(where[0]).startswith("127.") and address not in ("localhost", "127.0.0.1")
    return socket.create_server(("", port) if hidden else where[:2], family=family, backlog=socket.SOMAXCONN)
