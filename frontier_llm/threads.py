"""Work that may never end, and must not hold up whoever waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, work: Callable[[], T], name: str) -> T:
    """work(), done in a thread of its own, which is left behind with a TimeoutError after `limit_s`. What it raises is raised here.

    Not by an executor: the interpreter would wait for its threads at the end.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer.result(limit_s)
