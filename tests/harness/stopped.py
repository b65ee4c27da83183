"""Stops a process, for tests of what its peers do without it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stop_process(pid: int) -> None:
    """Stop a process, and return when each of its threads stands.

    `os.kill` returns earlier, and a thread that still runs could answer a request.
    """
    os.kill(pid, signal.SIGSTOP)
    while any(_state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)  # pytest's limit ends a wait that never ends


def _state(task: Path) -> str:
    """Return the letter of the state of a thread: T if it is stopped."""
    _, _, fields = (task / "stat").read_text(encoding="utf-8").rpartition(")")
    return fields.split()[0]
