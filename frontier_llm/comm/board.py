"""Heartbeats and failure records that outlive the collectives: each rank posts where it stands, and any rank reads it
while the others hang.

They are keys of the job's store, over connections of their own, so that a thread may use them while the main thread
waits.
"""

from __future__ import annotations

import json
import time
from typing import Any

from frontier_llm import log
from frontier_llm.comm.heartbeat import Heartbeats
from frontier_llm.comm.rendezvous import open_store, store_address
from frontier_llm.errors import BackendError

_PREFIX = "board"
FIRST_HEARTBEAT_S = 5.0  # until the first heartbeat can be read back


class Board:
    """One rank's access. Every method raises RuntimeError (torch's DistStoreError) if the store is gone or does not
    answer.
    """

    def __init__(self, timeout_s: float = 5.0, period_s: float = 0.25) -> None:
        """Connect to the store that `comm.connect` has joined. `period_s`: the usual time between two calls of
        `post`.
        """
        self._store = open_store(timeout_s)
        self._address = store_address()
        self._period_s = period_s
        self._heartbeats: Heartbeats | None = None
        self._posts = 0  # from Python
        self.outlives_rank_0 = self._address is not None

    def post(self, rank: int, notice: dict[str, Any]) -> None:
        """Replace this rank's notice; "posts" in it numbers the posts. With TCPStore a C++ thread posts it again if
        the next one is late.
        """
        if self._heartbeats is not None:
            self._heartbeats.update(notice)
        elif self._address is None:
            self._post_from_python(rank, notice)
        else:
            self._begin_heartbeats(self._address, rank, notice)

    def _post_from_python(self, rank: int, notice: dict[str, Any]) -> None:
        self._posts += 1
        self._store.set(f"{_PREFIX}/{rank}", json.dumps({**notice, "posts": self._posts}))

    def _begin_heartbeats(self, address: tuple[str, int], rank: int, notice: dict[str, Any]) -> None:
        """Send the first heartbeat and read it back. If that fails, this rank posts from Python for the rest of the
        run.
        """
        key = f"{_PREFIX}/{rank}"
        try:
            heartbeats = Heartbeats(address, key, self._period_s)
        except (BackendError, OSError) as error:
            self._fall_back(rank, notice, str(error))
            return
        heartbeats.update(notice)
        deadline_s = time.monotonic() + FIRST_HEARTBEAT_S
        while not self._store.check([key]):
            if time.monotonic() > deadline_s:
                heartbeats.close()
                self._fall_back(rank, notice, "this torch's store does not take them")
                return
            time.sleep(0.005)
        self._heartbeats = heartbeats

    def _fall_back(self, rank: int, notice: dict[str, Any], why: str) -> None:
        if rank == 0:
            log.warn(f"heartbeats come from Python, and stop while the main thread holds the interpreter lock: {why}")
        self._address = None
        self._post_from_python(rank, notice)

    def read(self, rank: int) -> dict[str, Any] | None:
        """A rank's newest notice; None before its first."""
        key = f"{_PREFIX}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def claim(self, name: str, value: str) -> str:
        """The first value that any rank has claimed under this name."""
        claimed = self._store.compare_set(f"{_PREFIX}/{name}", "", value)
        return claimed.decode()

    def claimed(self, name: str) -> str | None:
        """The claimed value, or None."""
        key = f"{_PREFIX}/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def close(self) -> None:
        """Send no more heartbeats."""
        if self._heartbeats is not None:
            self._heartbeats.close()
