"""Snapshots of a GPU's state use pinned memory of exactly the state's size."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from frontier_llm.checkpoint import snapshot


class Runtime:
    """CUDA's runtime as torch exposes it. torch uses the same function names for HIP's runtime."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses
        self.registered = dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered[address] = size
        return int(self.refuses)

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_pinned_memory_is_no_larger_than_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(refuses=False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    image = snapshot.pinned(1_000_001, dtype=torch.float32)
    assert runtime.registered == {image.data_ptr(): 4_000_004} and image.shape == (1_000_001,)
    del image
    gc.collect()
    assert not runtime.registered  # unregistered before the memory is freed


def test_where_the_driver_refuses_torch_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    real = torch.empty
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(refuses=True))
    monkeypatch.setattr(
        torch, "empty", lambda size, **options: asked.append(options) or real(size, dtype=options["dtype"])
    )
    snapshot.pinned(8, dtype=torch.float32)
    assert [options.get("pin_memory", False) for options in asked] == [False, True]
