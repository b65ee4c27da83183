from __future__ import annotations

import pytest

from frontier_llm.errors import OUT_OF_MEMORY
from frontier_llm.run.failure import Evidence, Failure, cause_of, lost_a_peer


@pytest.mark.parametrize(
    "text",
    [
        "OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 63.98 GiB",
        "AcceleratorError: CUDA error: out of memory",
        "RuntimeError: hipErrorOutOfMemory",
        "DistBackendError: NCCL WARN Cuda failure 2 'out of memory'",
    ],
)
def test_errors_of_the_devices_memory_are_a_cause_of_their_own(text: str) -> None:
    assert cause_of(text) == OUT_OF_MEMORY
    assert not lost_a_peer(text)  # although RCCL reports some of these errors


@pytest.mark.parametrize("text", ["RuntimeError: CUDA error: an illegal memory access", "MemoryError", "killed"])
def test_other_errors_of_memory_are_crashes(text: str) -> None:
    """In none of these errors is the device's memory too small, so a roomier layout, which needs less of it, does not
    help.
    """
    assert cause_of(text) == "crash"


def test_out_of_memory_is_a_fault_of_the_program() -> None:
    """The supervisor compares this text between starts. If it occurs three times before the first step, a run without a
    roomier plan ends.
    """
    failure = Failure("HIP out of memory. Tried to allocate 2.00 GiB", Evidence.EXCEPTION, OUT_OF_MEMORY)
    assert failure.program_fault == "HIP out of memory. Tried to allocate #.# GiB"
