"""Daemon threads. Unlike a thread of a pool, a daemon thread that hangs does not keep the process from ending."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from frontier_llm import log

T = TypeVar("T")


def in_daemon(work: Callable[[], T], name: str) -> Future[T]:
    """Start `work` in a daemon thread of this name. The future receives its result or exception of any type."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Heartbeat:
    """Touches a file at a fixed interval, so that other processes can see that its owner is alive."""

    def __init__(self, path: Path, every_s: float) -> None:
        self._path = path
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send, name="heartbeat", daemon=True)
        self._thread.start()

    def _send(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                os.utime(self._path)
            except OSError as error:  # the thread must continue when the file system recovers
                log.warn(f"cannot update the heartbeat {self._path}: {error.strerror}")

    def stop(self) -> None:
        """Stop the thread. The file is not touched after the return."""
        self._stopped.set()
        self._thread.join()
