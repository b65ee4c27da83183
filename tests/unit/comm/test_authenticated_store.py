"""The authenticated store gives the same answers as torch's own store, and process groups can be built on it."""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from frontier_llm.comm import Meeting, all_reduce_, barrier, build_mesh, connect, disconnect
from frontier_llm.comm.authenticated_store import (
    AuthenticatedStore,
    connect_here,
    open_server,
    receive_parts,
    send_parts,
    socket_name,
)
from frontier_llm.comm.handshake import Handshake, same_user
from frontier_llm.comm.heartbeat_store import HeartbeatStore
from frontier_llm.comm.rendezvous import StoreKind
from frontier_llm.run.launchers import free_port
from frontier_llm.topology.grid import Grid
from tests.harness.pool import RankPool

T = TypeVar("T")


@contextmanager
def opened(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the name of a Unix socket on which `serve` answers."""
    name = socket_name(os.urandom(16), 1, 0)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    listener.listen(64)
    entrance = Handshake(listener, same_user, serve, "a test")
    yield name
    entrance.close()


def store_at(name: str, timeout_s: float, connections: int = 100) -> AuthenticatedStore:
    return AuthenticatedStore(functools.partial(connect_here, name), timeout_s, connections=connections)


@pytest.fixture
def name() -> Iterator[str]:
    """Yield the name of the server's socket."""
    serve, close = open_server()
    with opened(serve) as name:
        yield name
    close()


@pytest.fixture
def upstream() -> dist.TCPStore:
    """torch's own store, for comparison."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)


def test_it_keeps_what_it_is_given(name: str) -> None:
    store = store_at(name, 5.0)
    other = store_at(name, 5.0)
    store.set("text", "zwölf")
    store.set("bytes", b"\0\xff" * 200_000)
    assert store.get("text").decode() == "zwölf" and other.get("bytes") == b"\0\xff" * 200_000
    assert store.add("count", 2) == 2 and other.add("count", 3) == 5 and store.add("count", 0) == 5
    with pytest.raises(dist.DistStoreError):
        store.add("text", 1)
    assert store.check(["text", "bytes"]) and not store.check(["text", "missing"])
    assert store.compare_set("claim", "", "mine") == b"mine" and other.compare_set("claim", "", "yours") == b"mine"
    assert store.delete_key("text") and not store.delete_key("text") and not other.check(["text"])
    prefixed = dist.PrefixStore("a", store)
    prefixed.set("key", "1")
    assert other.get("a/key") == b"1" and prefixed.get("key") == b"1"


def _timed_out(call: Callable[[], object]) -> bool:
    try:
        call()
    except dist.DistStoreError as error:
        return "wait timeout after" in str(error)
    return False


# Calls that torch 2.4 to 2.13 makes on a store, through a prefix as in C++. Each call returns a value to compare.
CALLS: dict[str, Callable[[dist.Store], object]] = {
    "a communicator's id": lambda store: (store.set("0", bytes(range(256))[-128:]), store.get("0")),
    "the ids of many roots": lambda store: (
        store.multi_set(["r0", "r1"], [b"\xfe", b"\xff"]),
        store.multi_get(["r0", "r1"]),
    ),
    "a barrier of the store": lambda store: (store.add("came", 1), store.add("came", 0), store.add("came", -1)),
    "a watchdog's look": lambda store: (store.check(["exception_dump"]), store.check([])),
    "a claim": lambda store: [
        store.compare_set("c", *pair) for pair in (("", b"\xff"), ("", "x"), (b"\xff", "y"), ("no", "z"))
    ],
    "a claim on nothing": lambda store: (store.compare_set("n", "expected", "z"), store.check(["n"])),
    "appended bytes": lambda store: (store.append("log", b"\xff"), store.append("log", b"\0"), store.get("log")),
    "a deleted key": lambda store: (
        store.set("old", "1"),
        store.delete_key("old"),
        store.delete_key("old"),
        store.check(["old"]),
    ),
    "how many keys": lambda store: (before := store.num_keys(), store.set("one more", "1"), store.num_keys() - before)[
        1:
    ],
    "a clone": lambda store: (store.clone().set("by the clone", "1"), store.get("by the clone")),
    "a wait that ends": lambda store: (
        store.set("there", "1"),
        store.wait(["there"]),
        store.wait(["there"], timedelta(seconds=1)),
    ),
    "a wait that does not": lambda store: _timed_out(lambda: store.wait(["never"], timedelta(milliseconds=50))),
    "a get that does not": lambda store: _timed_out(lambda: store.get("never")),
    "a get of many that does not": lambda store: _timed_out(lambda: store.multi_get(["0", "never"])),
    "a time-out set from a group": lambda store: (
        store.set_timeout(timedelta(seconds=0.1)),
        store.timeout,
        _timed_out(lambda: store.get("x")),
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_torch_s_groups_ask_is_answered_as_by_the_store_itself(
    upstream: dist.TCPStore, name: str, call: Callable[[dist.Store], object]
) -> None:
    upstream.set_timeout(timedelta(seconds=0.2))
    ours = store_at(name, 0.2)
    assert call(dist.PrefixStore("a", ours)) == call(dist.PrefixStore("b", upstream))


def test_waiting_for_a_key_holds_up_nobody(name: str) -> None:
    waiting = store_at(name, 60.0)
    other = store_at(name, 60.0)
    arrived: list[bytes] = []
    threads = [threading.Thread(target=lambda: arrived.append(waiting.get("late"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    other.set("else", "1")
    assert waiting.check(["else"])  # two threads are waiting on this store, which still answers.
    # If the waits blocked this thread, it would get here only after they had failed
    assert all(thread.is_alive() for thread in threads)
    other.set("late", "now")
    for thread in threads:
        thread.join(60.0)
    assert arrived == [b"now", b"now"]


def test_time_outs_and_a_gone_store_are_store_errors(name: str) -> None:
    store = store_at(name, 0.2)
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0\.2 s, keys: never"):
        store.get("never")
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0\.1 s"):
        store.wait(["never"], timedelta(seconds=0.1))
    store.set("still", "works")
    assert store.get("still") == b"works"
    with pytest.raises(dist.DistStoreError, match=r"cannot connect to the job's store within 0\.1 s"):
        store_at(name + "-other", 0.1)


def test_a_closed_server_is_gone_for_those_that_wait() -> None:
    serve, close = open_server()
    with opened(serve) as name, ThreadPoolExecutor(1) as pool:
        store = store_at(name, 60.0)
        waiting = pool.submit(store.get, "never")
        store.set("there", "1")
        close()
        with pytest.raises(dist.DistStoreError, match="lost the connection to the job's store"):
            waiting.result(30.0)


def test_questions_that_no_rank_asks_end_their_connection_alone(name: str) -> None:
    store = store_at(name, 5.0)
    with pytest.raises(dist.DistStoreError, match="no operation list_keys with 0 arguments"):
        store._ask("list_keys")
    for nonsense in (b"\0" * 4, b"\xff" * 12, b"\1\0\0\0" + b"\xff" * 8, b"\1"):
        with connect_here(name) as unauthenticated_peer:
            unauthenticated_peer.sendall(nonsense)
            unauthenticated_peer.shutdown(socket.SHUT_WR)
            unauthenticated_peer.settimeout(5.0)
            with suppress(ConnectionResetError):  # closing a connection with unread data resets it
                assert unauthenticated_peer.recv(1) == b""
    store.set("still", "works")


# (operation, arguments): too few arguments, or values that are not numbers or that no store can hold
UNANSWERABLE = [
    (b"add", b"text", b"1"),
    (b"add", b"count", b"one"),
    (b"add", b"count", b"1" * 30),
    (b"add", b"count"),
    (b"set", b"key"),
    (b"delete_key",),
    (b"compare_set", b"key", b""),
    (b"get",),
    (b"wait",),
    (b"get", b"soon", b"never"),
    (b"get", b"nan", b"never"),
    (b"\xff\xfe", b"key"),
    (b"",),
]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_question_that_cannot_be_answered_is_an_error_and_the_connection_lives(name: str) -> None:
    store = store_at(name, 0.2, connections=1)
    store.set("text", "twelve")
    (connection,) = store._idle
    for question in UNANSWERABLE:
        send_parts(connection, *question)
        connection.settimeout(5.0)
        status, reason = receive_parts(connection)
        assert status == b"error" and reason, question
    assert store.get("text") == b"twelve" and store._idle == [connection]


def _sockets_to(port: int) -> int:
    """Return the number of established TCP connections from this machine's processes to a local port, counted on the
    client's side.
    """
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(int(row[2].split(":")[1], 16) == port and row[3] == "01" for row in rows)


def _on_pretended_nodes(rank: int, port: int, per_node: int, kind: StoreKind) -> tuple[float, str, int]:
    dist.barrier()
    dist.destroy_process_group()  # leave the rank pool's own process group
    meeting = Meeting("127.0.0.1", port, rank - rank % per_node, per_node, lambda: b"a secret of this job", kind)
    connect(rank, 4, meeting, "gloo", 60.0)
    heartbeat_store = HeartbeatStore()
    heartbeat_store.post(rank, {"at": rank})
    mesh = build_mesh(Grid(2, 1, 2), rank, timeout_s=60.0)
    total = float(all_reduce_(torch.tensor([10.0**rank]), mesh.world)) + float(
        all_reduce_(torch.tensor([0.5]), mesh.tp)
    )
    claimed = heartbeat_store.claim("first", "same")
    barrier(mesh.world)
    notices = [heartbeat_store.read(other) for other in range(4)]
    connections = _sockets_to(port)
    barrier(mesh.world)
    assert [heartbeat and heartbeat["at"] for heartbeat in notices] == [0, 1, 2, 3]
    heartbeat_store.close()
    disconnect()
    return total, claimed, connections


@pytest.mark.parametrize(
    ("per_node", "kind", "expected"),
    [(2, "authenticated", 4), (4, "authenticated", 0), (2, "torch", 13), (4, "torch", 13)],
    ids=["two nodes", "one node", "torch's, two nodes", "torch's, one node"],
)
def test_groups_and_notices(ranks: RankPool, per_node: int, kind: StoreKind, expected: int) -> None:
    """The authenticated store has two connections from each rank of other nodes. torch's store has three from each rank
    (with heartbeats), and one of the server itself.
    """
    for total, claimed, connections in ranks.run(4, _on_pretended_nodes, free_port(), per_node, kind):
        assert (total, claimed) == (1112.0, "same")
        assert connections == expected
