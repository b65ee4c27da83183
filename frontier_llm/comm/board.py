"""A notice board that outlives the collectives: each rank posts where it stands, anyone may read it while the others are stuck.

It is the rendezvous' key-value store, over a connection of its own, so that a thread may use it while the main thread waits.
"""

from __future__ import annotations

import json
from typing import Any

from frontier_llm.comm.rendezvous import open_store

_PREFIX = "board"


class Board:
    """One rank's view. Every method raises RuntimeError (torch's DistStoreError) when rank 0's process, which holds the store, is gone."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        """Of the store that `comm.connect` has joined."""
        self._store = open_store(timeout_s)

    def post(self, rank: int, notice: dict[str, Any]) -> None:
        """Replace this rank's notice."""
        self._store.set(f"{_PREFIX}/{rank}", json.dumps(notice))

    def read(self, rank: int) -> dict[str, Any] | None:
        """A rank's newest notice; None before its first."""
        key = f"{_PREFIX}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def claim(self, name: str, value: str) -> str:
        """The first value that any rank has claimed under this name."""
        claimed = self._store.compare_set(f"{_PREFIX}/{name}", "", value)
        return claimed.decode()

    def claimed(self, name: str) -> str | None:
        """What has been claimed, or None."""
        key = f"{_PREFIX}/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None
