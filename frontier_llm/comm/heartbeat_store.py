"""Exchanges heartbeats and failure records among ranks through the job's store, even while collectives hang.

Each rank writes its heartbeat to its own key, and any rank can read this key.
The store connections are separate, so that a thread can use them while the main thread waits in a collective.
"""

from __future__ import annotations

import json
import time
from typing import Any

from frontier_llm import log
from frontier_llm.comm.heartbeat import Heartbeats
from frontier_llm.comm.rendezvous import open_store, store_address
from frontier_llm.errors import BackendError

_PREFIX = "heartbeats"
FIRST_HEARTBEAT_S = 5.0  # time limit for reading back the first heartbeat


class HeartbeatStore:
    """One rank's access to the heartbeats and failure records of all ranks.

    Every method raises RuntimeError (torch's DistStoreError) if the store is gone or does not reply.
    """

    def __init__(self, timeout_s: float = 5.0, period_s: float = 0.25) -> None:
        """Connect to the store that `comm.connect` has joined.

        `period_s` is the usual time between two calls of `post`.
        """
        self._store = open_store(timeout_s)
        self._address = store_address()
        self._period_s = period_s
        self._heartbeats: Heartbeats | None = None
        self._posts = 0  # heartbeats sent from Python, without the C++ thread
        self.outlives_rank_0 = self._address is not None  # TCPStore's server has its own process

    def post(self, rank: int, heartbeat: dict[str, Any]) -> None:
        """Write this rank's newest heartbeat. The number of its heartbeats so far is added as "posts".

        With TCPStore, a C++ thread sends the heartbeat again if the next call of `post` is late.
        """
        if self._heartbeats is not None:
            self._heartbeats.update(heartbeat)
        elif self._address is None:
            self._post_from_python(rank, heartbeat)
        else:
            self._begin_heartbeats(self._address, rank, heartbeat)

    def _post_from_python(self, rank: int, heartbeat: dict[str, Any]) -> None:
        self._posts += 1
        self._store.set(f"{_PREFIX}/{rank}", json.dumps({**heartbeat, "posts": self._posts}))

    def _begin_heartbeats(self, address: tuple[str, int], rank: int, heartbeat: dict[str, Any]) -> None:
        """Send the first heartbeat from C++ and read it back.

        If this fails, this rank sends its heartbeats from Python for the rest of the run.
        """
        key = f"{_PREFIX}/{rank}"
        try:
            heartbeats = Heartbeats(address, key, self._period_s)
        except (BackendError, OSError) as error:
            self._fall_back(rank, heartbeat, str(error))
            return
        heartbeats.update(heartbeat)
        deadline_s = time.monotonic() + FIRST_HEARTBEAT_S
        while not self._store.check([key]):
            if time.monotonic() > deadline_s:
                heartbeats.close()
                self._fall_back(rank, heartbeat, "the store of this torch does not accept them")
                return
            time.sleep(0.005)
        self._heartbeats = heartbeats

    def _fall_back(self, rank: int, heartbeat: dict[str, Any], why: str) -> None:
        if rank == 0:
            log.warn(
                f"heartbeats are sent from Python and stop while the main thread holds the interpreter lock: {why}"
            )
        self._address = None
        self._post_from_python(rank, heartbeat)

    def read(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's newest heartbeat, or None if the rank has sent none yet."""
        key = f"{_PREFIX}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def claim(self, name: str, value: str) -> str:
        """Store `value` under `name`, unless a rank has already stored a value. Returns the stored value."""
        claimed = self._store.compare_set(f"{_PREFIX}/{name}", "", value)
        return claimed.decode()

    def claimed(self, name: str) -> str | None:
        """Return the value that `claim` has stored under this name, or None."""
        key = f"{_PREFIX}/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def close(self) -> None:
        """Stop sending heartbeats."""
        if self._heartbeats is not None:
            self._heartbeats.close()
