"""On a GPU the host runs ahead of the device, unless it asks for a number: a step asks once, when it decides whether to update."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from frontier_llm.comm import serial_mesh
from frontier_llm.topology import make_plan
from frontier_llm.train.build import build_state
from frontier_llm.train.step import train_step
from tests.parity.cases import Case
from tests.parity.play import Source

# what makes a host wait for a GPU: a value read, or a shape that depends on values
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero")


class Waits(TorchDispatchMode):
    """Counts the operations of WAITS."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in WAITS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["gpt", "llama", "mpt"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_host_reads_the_device_once(family: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(family, recompute=recompute)
    config, source = case.config("fp32"), Source(case, 0)
    state = build_state(config, make_plan(config, 1), serial_mesh(), torch.device("cpu"), source)
    reads = []
    tolist = torch.Tensor.tolist  # on the CPU not an operation of its own
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or tolist(tensor))
    with Waits() as waits:
        train_step(state)
    assert len(reads) == 1 and waits.counts == Counter()
