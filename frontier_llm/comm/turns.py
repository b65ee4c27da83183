"""One communication of a rank after the other: each begins when the one before it has ended.

Two or three communicators in flight hang on gfx90a with recent RCCL, even when all ranks issue them in one order
(ROCm/rccl#2191). One is always enough: ranks play restrictions of one order (schedule/order.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from frontier_llm.comm.group import DONE, Sending


class Turns:
    """One per rank. On a CPU the host waits; on a GPU the device does, on a stream through which all communication is
    issued.

    There each call is enqueued behind the compute so far and behind the end of the call before it; compute waits only
    for what it needs.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def take(self, begin: Callable[[], Sending], staged: bool) -> Sending:
        """Begin a communication in its turn. What is `staged` consists of others, which take their own turns."""
        if self._stream is None:
            begin().wait()
            return DONE
        if staged:
            return begin()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work = begin()
            work.wait()
        return work
