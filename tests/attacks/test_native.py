"""The C++ functions report ranks, indices and lengths that do not exist.

scripts/check_native.sh runs these tests with sanitizers.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from frontier_llm.comm import host_memory
from frontier_llm.data import native
from frontier_llm.errors import DataError

BAD_ARGUMENT = -4


@pytest.mark.parametrize("rank", [-1, 2, 3, 511, 1 << 30])
def test_messages_to_and_from_ranks_that_do_not_exist(rank: int) -> None:
    library = host_memory.library()
    status = ctypes.c_int64(0)
    descriptor, _ = host_memory.create_memory()
    region = library.fl_shm_open(descriptor, 0, 2, 1 << 20, 1 << 20, 0, ctypes.byref(status))
    data = ctypes.create_string_buffer(8)
    assert library.fl_shm_send(region, rank, ctypes.addressof(data), 8, 0) == BAD_ARGUMENT
    assert library.fl_shm_receive(region, rank, ctypes.addressof(data), 8, 0) == BAD_ARGUMENT
    assert (library.fl_shm_progress(region, rank), library.fl_shm_is_missing(region, rank)) == (0, 1)
    library.fl_shm_close(region)


@pytest.mark.parametrize("damage", [1 << 44, -(1 << 44), -1, (1 << 63) - 1])
def test_documents_outside_of_the_table(damage: int) -> None:
    lengths = np.full(8, 5, np.int32)
    documents = np.arange(9, dtype=np.int64)
    documents[3] = damage
    prefix = np.zeros(9, np.uint64)
    out = [np.zeros(64, np.int64) for _ in range(4)]
    with pytest.raises(DataError):
        native.call("fl_build", lengths, documents, 8, 1, 1, 1, prefix)
    prefix[:] = np.arange(9) * 5
    with pytest.raises(DataError):
        native.call("fl_pieces", lengths, documents, np.zeros(8, np.int64), 8, 1, 1, prefix, 0, 40, *out)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_all_of_it_under_sanitizers() -> None:
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("this is that run")
    ended = subprocess.run(
        [Path(__file__).parents[2] / "scripts" / "check_native.sh"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
