"""How far a long work is, on one line of a terminal; nothing where stderr is a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable


class ProgressBar:
    """`on(what)` gives a callback; `close()` ends the line."""

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._any = False

    def on(self, what: str, unit: str) -> Callable[..., None]:
        """A callback (done[, of]) that says how far `what` is."""

        def report(done: int, of: int | None = None) -> None:
            if self._shown:
                self._any = True
                sys.stderr.write(f"\r\033[K{what}: {done:,}" + (f" of {of:,}" if of is not None else "") + f" {unit}")
                sys.stderr.flush()

        return report

    def close(self) -> None:
        """End the line, if there is one."""
        if self._any:
            sys.stderr.write("\n")
