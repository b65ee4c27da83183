"""Receives signals even while a rank is blocked inside a collective.

A Python signal handler runs between byte codes of the main thread. A rank that waits in gloo for a dead peer does not
run the handler in time (measured: 6.0 s late, when the collective returned). However, CPython's C handler writes the
signal's number to the wakeup descriptor at once. A thread of this module reads the number and sets a flag. The training
loop checks the flag between steps.

Before the handlers exist, which takes at least 0.5 s after the start, a signal would kill the process. Therefore the
process that starts ranks blocks these signals (`held`). The signals stay pending in the kernel, also across exec,
until a SignalWatcher is entered. Before any rank starts, a command checks its run and has nothing to save, so SIGTERM
ends it at once.
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

# Exit code of a rank that saved because of a signal: the batch script then requeues (75 = EX_TEMPFAIL, "try again")
EXIT_INTERRUPTED = 75
# signals that a command blocks while it checks its run, so that Slurm's warning stays pending until ranks can save
BEFORE_RANKS = (signal.SIGUSR1, signal.SIGHUP)
HELD = (*BEFORE_RANKS, signal.SIGTERM)
# SIGINT is not held back: no training state can be lost yet, and the user expects an immediate end
SIGNALS = (*HELD, signal.SIGINT)


def heeded() -> list[signal.Signals]:
    """Return SIGNALS, without SIGHUP if it is ignored: under `nohup` the run must survive the end of the terminal."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def held(numbers: Collection[signal.Signals] = HELD) -> Iterator[None]:
    """Block these signals in the `with` body and in processes that the body starts. Main thread only.

    Blocked signals stay pending until a SignalWatcher is entered.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class SignalWatcher:
    """Context manager that records signals. `.requested` is the name of the first of SIGNALS ('SIGUSR1'), or None.

    The first signal requests an orderly end. A second signal, `debounce_s` or more later, ends the process at once with
    128 + its number, even if the main thread is blocked. Data that is committed to disk stays. Repeats within
    `debounce_s` count as one request, because Slurm and a script's trap can both deliver the same warning.
    Must be entered in the main thread. Restores handlers, wakeup descriptor and mask on exit.
    """

    def __init__(self, debounce_s: float = 1.0) -> None:
        self._debounce_s = debounce_s
        self.requested: str | None = None  # name of the first signal that arrived
        self._first_at_s = 0.0

    def __enter__(self) -> SignalWatcher:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        # the handlers do nothing, because Python writes each signal to the wakeup descriptor, which the thread reads
        self._old: dict[signal.Signals, Any] = {number: signal.signal(number, lambda *_: None) for number in heeded()}
        self._thread = threading.Thread(target=self._listen, name="signal-watcher", daemon=True)
        self._thread.start()
        self._old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # delivers pending signals
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
            self._write.shutdown(socket.SHUT_WR)  # the thread reads an end of file and ends
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
            print(f"received {arrived.name} after {self.requested}: exiting at once", file=sys.stderr, flush=True)
            os._exit(128 + arrived)
