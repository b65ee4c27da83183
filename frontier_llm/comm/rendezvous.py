"""Where the ranks of a job meet: the key-value store that rank 0 serves, and who has a connection to it."""

from __future__ import annotations

import resource
import socket
from datetime import timedelta

import torch.distributed as dist

from frontier_llm.comm.node_store import NodeStore, relay_name
from frontier_llm.comm.relay import Relay
from frontier_llm.errors import BackendError

OWN_FILES = 1024  # what a rank opens besides: data, libraries, logs

_kept: list[dist.Store] = []  # torch keeps only the C++ half of a store that is written in Python


def join_store(rank: int, world_size: int, address: str, port: int, timeout: timedelta, node: tuple[int, int] | None) -> dist.Store:
    """A rank's view of the store; `node` is (this node's first global rank, ranks per node) where a relay serves the ranks of a node.

    The first rank of a node then goes through its own relay too: a wait of its main thread on the connection itself would hold up
    the others. Raises BackendError when rank 0 may not open enough files, RuntimeError or OSError when the store is not reached.
    """
    nodes = -(-world_size // node[1]) if node else world_size  # each has its connection
    if rank == 0:
        allow_connections(2 * nodes)
    if node is None or rank == node[0]:
        listener = _listen(address, port) if rank == 0 else None
        direct = dist.TCPStore(
            address, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False, master_listen_fd=listener
        )
        if node is None:
            return direct
        Relay(direct, relay_name(address, port, rank), nodes)
    _kept.append(NodeStore(relay_name(address, port, node[0]), timeout.total_seconds()))
    return _kept[-1]


def forget_stores() -> None:
    """After the groups have gone."""
    _kept.clear()


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files to what the store's clients need: two each, for the groups and the notice board."""
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


def _listen(address: str, port: int) -> int:
    """A listening descriptor for the store, on the interface that the job uses: the store asks nobody who they are.

    A host whose own table maps its name to loopback (Debian's 127.0.1.1) cannot know that interface and listens on all.
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    hidden = str(where[0]).startswith("127.") and address not in ("localhost", "127.0.0.1")
    return socket.create_server(("", port) if hidden else where[:2], family=family, backlog=socket.SOMAXCONN).detach()
