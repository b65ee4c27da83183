"""How much of a stranger's file a reader takes: its own bound, times what the user has lifted all of them by.

For files that their owner trusts and that are larger than any known so far: a manifest of 75,000 ranks, a model of more
tensors.
"""

from __future__ import annotations

import os
from typing import BinaryIO

from frontier_llm.errors import ConfigError

VARIABLE = "FRONTIER_LLM_LIFT_BOUNDS"
LIFT = f"if that is right, {VARIABLE}=N takes N times as much"

_times = 1


def lift(times: str | None) -> None:
    """What the environment says; None leaves the bounds as they are. Raises ConfigError for what is no number from 1
    to 1000.
    """
    if times is not None and not (
        times.isascii() and times.isdecimal() and 1 <= len(times) <= 4 and 1 <= int(times) <= 1000
    ):
        raise ConfigError(
            f"{times[:20]!r} is not a whole number from 1 to 1000", "unset it, or name a number", VARIABLE
        )
    globals()["_times"] = int(times or 1)


def lifted(bound: int) -> int:
    """The bound as it stands now."""
    return bound * _times


def read_beyond(file: BinaryIO, bound: int) -> bytes:
    """A file's content, cut off one byte beyond the bound; memory is taken for what is there, not for the bound."""
    return file.read(min(bound, os.fstat(file.fileno()).st_size) + 1)
