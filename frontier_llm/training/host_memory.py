"""How a CPU rank's allocator treats what each step frees and allocates again."""

from __future__ import annotations

import ctypes

from frontier_llm.units import MIB

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = -1
_LARGEST_KEPT_BYTES = 32 * MIB  # the most that glibc takes


def keep_freed_memory() -> None:
    """Keep freed blocks of up to 32 MiB in this process; does nothing where the C library is not glibc.

    glibc gives the top of its heap back when twice its largest block is free there, which is so at each end of a
    backward pass: a step of bench-l8-h384 in bf16 then met 38,000 pages for the first time and spent 3 to 5 % of its
    CPU time on them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
