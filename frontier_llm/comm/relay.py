"""The relay in the first rank of a node: it serves the node's ranks from the one connection that they share (see `comm.node_store`).

It spares the server more than sockets. Of the ranks that wait for a key one asks, and the more nodes and keys there are the less often: polls of
all nodes together stay below what the server can take. And ids of communicators, which never change, come from the server once per node:
torch lets each of 75,264 ranks ask for 588 of them, 5.7 GB in all.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from frontier_llm.comm.node_store import Parts, receive_parts, send_parts
from frontier_llm.machine.env import STORE_CHECKS_PER_S

FIRST_POLL_S, LONGEST_POLL_S = 0.001, 0.1  # of a key that is waited for; the pause doubles
IDS_AT_ONCE = 32  # asked for in one question, some 2 KB: a root that is late costs a poll of this many, not of all


def longest_poll_s(nodes: int, asking: int) -> float:
    """The pause between two polls of a thread, when `asking` of them poll on each node."""
    return max(LONGEST_POLL_S, nodes * asking / STORE_CHECKS_PER_S)


class Relay:
    """Answers connections from `upstream`, a thread for each; they end with their clients."""

    def __init__(self, upstream: dist.Store, nodes: int = 1) -> None:
        self._upstream, self._nodes = upstream, nodes
        self._ids: dict[str, bytes] = {}
        self._turns: dict[tuple[str, ...], threading.Lock] = {}
        self._asking: set[int] = set()  # threads that poll

    def serve(self, connection: socket.socket) -> None:
        """Take a connection over."""
        threading.Thread(target=self._serve, args=(connection,), name="store relay client", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while True:
                try:
                    operation, *arguments = receive_parts(connection)
                except OSError:
                    return
                try:
                    reply = b"ok", *self._answer(operation.decode(), arguments)
                except RuntimeError as error:  # DistStoreError is one: a time-out, or the server is gone
                    reply = b"error", str(error).encode()
                except (IndexError, OverflowError, TypeError, ValueError) as error:  # no question of a store: its asker alone hears of it
                    reply = b"error", f"the store cannot answer {operation!r} of {arguments!r:.200}: {error}".encode()
                try:
                    send_parts(connection, *reply)
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
                return self._get_ids(keys[1:], float(arguments[0]))
            case _:
                raise RuntimeError(f"the store relay does not know {operation!r}")

    def _await(self, keys: list[str], timeout_s: float) -> None:
        """Until all are there. By asking: a wait of the shared connection would hold up every other rank of the node."""
        if not self._upstream.check(keys):
            deadline_s = time.monotonic() + timeout_s
            with self._turn(keys, deadline_s, timeout_s):
                self._poll(keys, deadline_s, timeout_s)

    def _get_ids(self, keys: list[str], timeout_s: float) -> Parts:
        """Values of keys that are asked for together: torch does so for ids of communicators alone, and writes each once."""
        deadline_s = time.monotonic() + timeout_s
        for start in range(0, len(keys), IDS_AT_ONCE):
            some = keys[start : start + IDS_AT_ONCE]
            with self._turn(some, deadline_s, timeout_s):
                if missing := [key for key in some if key not in self._ids]:
                    self._poll(missing, deadline_s, timeout_s)
                    self._ids.update(zip(missing, self._upstream.multi_get(missing), strict=True))
        return [self._ids[key] for key in keys]

    @contextmanager
    def _turn(self, keys: list[str], deadline_s: float, timeout_s: float) -> Iterator[None]:
        """Hold up those that want the same keys: they need not ask before this one knows."""
        turn = self._turns.setdefault(tuple(keys), threading.Lock())
        if not turn.acquire(timeout=max(deadline_s - time.monotonic(), 0.0)):
            raise _late(keys, timeout_s)
        try:
            yield
        finally:
            turn.release()

    def _poll(self, keys: list[str], deadline_s: float, timeout_s: float) -> None:
        self._asking.add(threading.get_ident())
        pause_s = FIRST_POLL_S
        try:
            while not self._upstream.check(keys):
                if time.monotonic() > deadline_s:
                    raise _late(keys, timeout_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_poll_s(self._nodes, len(self._asking)))
        finally:
            self._asking.discard(threading.get_ident())


def _late(keys: list[str], timeout_s: float) -> dist.DistStoreError:
    return dist.DistStoreError(f"wait timeout after {timeout_s:g} s, keys: {', '.join(keys)}")
