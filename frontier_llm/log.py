"""One line per message on stderr: rank 0 speaks for the run, any rank may speak for itself.

A message that cannot be written (the log's disk is full, the terminal has gone) must not end what it tells of.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from frontier_llm.units import printable

_rank: int | None = None


def set_rank(rank: int, world_size: int) -> None:
    """Prefix this process's own messages with its rank; called once, by whoever learns the rank."""
    globals()["_rank"] = rank if world_size > 1 else None


def info(message: str) -> None:
    """A message of the run; printed by rank 0 (or by the only process)."""
    if not _rank:
        _say(message)


def warn(message: str) -> None:
    """A message of this process, from any rank."""
    who = "" if _rank is None else f"[rank {_rank}] "
    _say(f"{who}warning: {message}")


def _say(message: str) -> None:
    with suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {printable(message)}", file=sys.stderr, flush=True)
