"""Interleaves two computations of a rank, called halves: the forward of one microbatch and the backward of another
microbatch.

Only one half runs at a time. When the running half has to wait for communication, the other half runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import TypeVar

import torch

Half = TypeVar("Half")


class _Dropped(BaseException):
    """Exception that ends one half after the other half has failed."""


class Interleaving:
    """Runs two halves in turn, so that only one of them runs at any time. A rank has one object of this class.

    Each half is a function call in its own thread. The other half continues when the running half calls `switch_halves`
    or ends. So the order does not depend on timing, and all ranks that run the same two halves have the same order.
    On a GPU both halves submit kernels to one stream. A half that resumes queues its wait for communication after the
    other half's kernels, so communication and kernels overlap. Any thread may call `switch_halves` for the running
    half, because autograd runs a GPU's backward in its own thread.
    """

    def __init__(self) -> None:
        self._wakes: tuple[Semaphore, Semaphore]
        self._holder = 0  # index of the half that runs
        self._shared = False  # True while both halves are unfinished
        self._error: BaseException | None = None
        self._on_resume: Callable[[], object]
        self._second = ThreadPoolExecutor(1, "second half")  # one thread for all pairs, started at the first pair

    def run_both(
        self, halves: Sequence[Half], run: Callable[[Half], None], on_resume: Callable[[Half], object]
    ) -> None:
        """Run two halves to their ends. The first half runs in this thread.

        `on_resume` is called with a half each time this half starts or resumes.
        If one half raises an exception, the other half ends when it resumes next. The exception is then raised here.
        """
        self._wakes = (Semaphore(0), Semaphore(0))
        self._holder = 0
        self._shared = True
        self._error = None
        self._on_resume = lambda: on_resume(halves[self._holder])
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def second() -> None:
            with torch.cuda.stream(stream):  # each thread has its own current stream and device
                self._wakes[1].acquire()
                self._run(lambda: run(halves[1]))

        ended = self._second.submit(second)
        self._run(lambda: run(halves[0]))
        ended.result()
        if self._error is not None:
            raise self._error

    def switch_halves(self) -> None:
        """Let the other half run, and return when that half switches back or ends.

        Returns at once if there is no other half.
        """
        if self._shared:
            mine = self._holder
            self._give(1 - mine)
            self._wakes[mine].acquire()
            self._take()

    def _run(self, half: Callable[[], None]) -> None:
        """Wait for this half's turn, run it to its end, and then let the other half run to its end."""
        try:
            self._take()
            half()
        except _Dropped:
            pass
        except BaseException as error:
            self._error = self._error or error
        if self._shared:
            self._shared = False
            self._give(1 - self._holder)

    def _give(self, half: int) -> None:
        self._holder = half
        self._wakes[half].release()

    def _take(self) -> None:
        if self._error is not None:
            raise _Dropped
        self._on_resume()
