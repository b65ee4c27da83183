"""Writes log messages to stderr, one line each. `info` prints on rank 0 only, `warn` on every rank.

A message that cannot be written (full disk, closed terminal) must not raise an error that hides the logged event.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from frontier_llm.units import printable

_rank: int | None = None
_is_quiet = False


@contextmanager
def quiet() -> Iterator[None]:
    """Do not print the messages of `info` inside of this context. A check that runs a step uses it."""
    globals()["_is_quiet"] = True
    try:
        yield
    finally:
        globals()["_is_quiet"] = False


def set_rank(rank: int, world_size: int) -> None:
    """Prefix the warnings of this process with its rank. Called once, as soon as the rank is known."""
    globals()["_rank"] = rank if world_size > 1 else None


def info(message: str) -> None:
    """Log a message of the run. Only rank 0, or the only process, prints it."""
    if not _rank and not _is_quiet:
        _say(message)


def warn(message: str) -> None:
    """Log a warning of this process. Every rank prints it."""
    who = "" if _rank is None else f"[rank {_rank}] "
    _say(f"{who}warning: {message}")


def _say(message: str) -> None:
    with suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {printable(message)}", file=sys.stderr, flush=True)
