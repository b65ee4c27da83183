"""Measures the device memory of communicators: buffers of RCCL or NCCL, which torch's allocator does not count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def outside_allocator_bytes(device: torch.device) -> int:
    """Return the used memory of a GPU that torch's allocator has not reserved; 0 on a CPU.

    This is the runtime's context, loaded kernels and communicators, and the memory of other processes on the device.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


class GroupMemory:
    """Device memory outside torch's allocator, before and after the first use of each group of a rank."""

    def __init__(self, probe: Callable[[], int]) -> None:
        """`probe` returns the bytes in use now."""
        self._probe = probe
        self.before_bytes = probe()
        self.by_group: dict[str, int] = {}

    @contextmanager
    def first_use(self, name: str) -> Iterator[None]:
        """Record the additional bytes that the body, the first use of the group `name`, takes."""
        before = self._probe()
        yield
        self.by_group[name] = self._probe() - before

    def now_bytes(self) -> int:
        """Return the bytes in use now. A communicator allocates more memory at its first large message, and at its
        first message of a new kind.
        """
        return self._probe()
