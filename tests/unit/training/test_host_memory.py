"""A CPU rank keeps the memory that it frees, so that the next step has no first-touch page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEASURE = """
import resource, sys
from frontier_llm.training.device import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"x") * (24 << 20) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    keep_freed_memory()
faults(), faults()
print(faults())
"""
PAGES = 4 * (24 << 20) // 4096


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone")
def test_freed_blocks_keep_their_pages() -> None:
    kept, usual = (
        int(subprocess.run([sys.executable, "-c", MEASURE, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "usual")
    )
    assert usual > PAGES / 2 and kept < PAGES / 50
