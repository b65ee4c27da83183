"""Stops a process. Tests then check what the other processes do while it is stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stop_process(pid: int) -> None:
    """Stop a process, and wait until all of its threads have stopped.

    `os.kill` alone returns earlier. A thread that still runs could then answer a request.
    """
    os.kill(pid, signal.SIGSTOP)
    while any(_state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)  # pytest's limit ends a wait that never ends


def _state(task: Path) -> str:
    """Return the state of a thread as the letter in /proc. A stopped thread has the letter T."""
    _, _, fields = (task / "stat").read_text(encoding="utf-8").rpartition(")")
    return fields.split()[0]
