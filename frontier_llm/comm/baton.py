"""Two halves of a rank's work of which one runs at a time: the other's compute takes place where a half would wait
for what is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import TypeVar

import torch

Half = TypeVar("Half")


class _Dropped(BaseException):
    """Unwinds a half whose other half has failed."""


class Baton:
    """One per rank. Each half is a plain call on a thread of its own, and who has the baton runs.

    It changes hands where its holder says so (`pass_on`) and when a half ends, so the order is a matter of the program
    alone: the same on all ranks that run the same two. On a GPU both submit to one stream; a half that comes back makes
    it wait behind the other's kernels, which is the overlap. Whoever calls `pass_on` is the holder, whatever the
    thread: autograd runs a GPU's backward on one of its own.
    """

    def __init__(self) -> None:
        self._wakes: tuple[Semaphore, Semaphore]
        # while both halves have something left
        self._holder = 0
        self._shared = False
        self._error: BaseException | None = None
        self._taken: Callable[[], object]
        self._second = ThreadPoolExecutor(1, "second half")  # one for good: it is started at the first pair

    def share(self, halves: Sequence[Half], run: Callable[[Half], None], turn: Callable[[Half], object]) -> None:
        """Run two halves to their ends, the first from this thread; `turn` is told who has the baton, whenever it
        changes hands.

        What one of them raises ends the other at its next turn, and is raised here.
        """
        self._wakes = (Semaphore(0), Semaphore(0))
        self._holder = 0
        self._shared = True
        self._error = None
        self._taken = lambda: turn(halves[self._holder])
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def second() -> None:
            with torch.cuda.stream(stream):  # and on its device: both are a thread's own
                self._wakes[1].acquire()
                self._run(lambda: run(halves[1]))

        ended = self._second.submit(second)
        self._run(lambda: run(halves[0]))
        ended.result()
        if self._error is not None:
            raise self._error

    def pass_on(self) -> None:
        """Return when the other half has passed the baton back or has ended; at once where there is none."""
        if self._shared:
            mine = self._holder
            self._give(1 - mine)
            self._wakes[mine].acquire()
            self._take()

    def _run(self, half: Callable[[], None]) -> None:
        """From the first turn to the end; the rest is the other's."""
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
        self._taken()
