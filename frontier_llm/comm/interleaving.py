"""Interleaves two halves of a rank's work, for example a forward and the backward of another microbatch.

One half runs at a time. When it would wait for communication, the other half computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import TypeVar

import torch

Half = TypeVar("Half")


class _Dropped(BaseException):
    """Ends a half after the other half has failed."""


class Interleaving:
    """Lets one of two halves run at a time; one object per rank.

    Each half is a function call in its own thread. The running half changes when it calls `switch_halves` and when it
    ends. So the program alone determines the order, and all ranks that run the same two halves have the same order.
    On a GPU both halves submit kernels to one stream. A half that resumes queues its wait for communication behind the
    other half's kernels, so communication and kernels overlap. Any thread may call `switch_halves` for the running
    half, because autograd runs a GPU's backward in its own thread.
    """

    def __init__(self) -> None:
        self._wakes: tuple[Semaphore, Semaphore]
        self._holder = 0  # index of the half that runs
        self._shared = False  # whether both halves are unfinished
        self._error: BaseException | None = None
        self._on_resume: Callable[[], object]
        self._second = ThreadPoolExecutor(1, "second half")  # one thread for all pairs, started at the first pair

    def run_both(
        self, halves: Sequence[Half], run: Callable[[Half], None], on_resume: Callable[[Half], object]
    ) -> None:
        """Run two halves to their ends, the first in this thread.

        `on_resume` is called with a half each time this half starts or resumes.
        An exception of one half ends the other half when it resumes next, and is then raised here.
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
        """Let the other half run, and return when it yields or ends. Returns at once if there is no other half."""
        if self._shared:
            mine = self._holder
            self._give(1 - mine)
            self._wakes[mine].acquire()
            self._take()

    def _run(self, half: Callable[[], None]) -> None:
        """Run a half from its first step to its end, then let the other half run to its end."""
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
