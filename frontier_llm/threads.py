"""Work in a daemon thread of its own: unlike a pool's, one that hangs does not keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
