"""Signals that reach a rank even while it is blocked inside a collective.

A Python signal handler runs between byte codes of the main thread; a rank waiting in gloo for a dead peer never gets
there (measured: 6.0 s late, exactly when the collective returned). CPython's C-level handler, however, writes the
signal's number to the wakeup descriptor at once, from whichever thread the kernel chose. A thread reads it here and
raises a flag; the training loop looks at the flag between steps.

Until there are handlers, half a second after the start at best, a signal would kill the process. So whoever starts
ranks holds the warnings back (`held`): they wait in the kernel, also across exec, until a watcher takes them. Before
any rank starts, a command checks its run and has nothing to save: SIGTERM then ends it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Any

# A rank saved at a signal and is not done: a batch script requeues on this code (75 = EX_TEMPFAIL, "try again later")
EXIT_INTERRUPTED = 75
# blocked while a command checks its run: a batch script's warning is then acted on later
BEFORE_RANKS = (signal.SIGUSR1, signal.SIGHUP)
HELD = (*BEFORE_RANKS, signal.SIGTERM)
SIGNALS = (*HELD, signal.SIGINT)  # Ctrl-C is not held back: nothing is lost yet, and the user sits there waiting


def heeded() -> list[signal.Signals]:
    """SIGNALS, without a SIGHUP that is ignored: who starts us under `nohup` means us to outlive the terminal."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def held(numbers: Collection[signal.Signals] = HELD) -> Iterator[None]:
    """In the body, and in processes started there, these signals wait until a SignalWatcher is entered. Main thread
    only.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class SignalWatcher:
    """Context manager: `.requested` is None until one of SIGNALS arrives, then its name ('SIGUSR1').

    The first signal asks for an orderly end. A second one, `debounce_s` or more after it, ends the process at once with
    128 + its number, even when the main thread is stuck: what has been committed to disk stays, nothing else is waited
    for. Within `debounce_s` repeats count as one request, because Slurm and a script's trap may both deliver the same
    warning. Must be entered in the main thread; restores handlers, wakeup descriptor and mask when left.
    """

    def __init__(self, debounce_s: float = 1.0) -> None:
        self._debounce_s = debounce_s
        self.requested: str | None = None  # name of the first signal that arrived
        self._first_at_s = 0.0

    def __enter__(self) -> SignalWatcher:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        # the handlers do nothing: the wakeup descriptor has already told the thread
        self._old: dict[signal.Signals, Any] = {number: signal.signal(number, lambda *_: None) for number in heeded()}
        self._thread = threading.Thread(target=self._listen, name="signal-watcher", daemon=True)
        self._thread.start()
        self._old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # takes what has been held back
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        with contextlib.suppress(OSError):
            self._write.shutdown(socket.SHUT_WR)  # end of file wakes the thread
        self._thread.join()
        self._read.close()
        self._write.close()

    def _listen(self) -> None:
        while numbers := self._read.recv(64):
            for number in numbers:
                if number in SIGNALS:
                    self._receive(signal.Signals(number))

    def _receive(self, arrived: signal.Signals) -> None:
        now_s = time.monotonic()
        if self.requested is None:
            self._first_at_s = now_s
            self.requested = arrived.name
        elif now_s - self._first_at_s >= self._debounce_s:
            print(f"{arrived.name} after {self.requested}: leaving at once", file=sys.stderr, flush=True)
            os._exit(128 + arrived)
