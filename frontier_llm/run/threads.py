"""Daemon threads: unlike a pool's, one that hangs does not keep the process from ending."""

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
    """Begin the work in a thread of this name; its result or its exception, whatever it is, is the future's."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Heartbeat:
    """Touches a file every few seconds, so that others see that whoever made it lives."""

    def __init__(self, path: Path, every_s: float) -> None:
        self._path = path
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                os.utime(self._path)
            except OSError as error:  # a file system that hangs for a while must not end it
                log.warn(f"cannot renew {self._path}: {error.strerror}")

    def stop(self) -> None:
        """No touch comes after this."""
        self._stopped.set()
        self._thread.join()
