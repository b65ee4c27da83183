"""Number of times that the host reads a number from the device between the router and the experts' sum.

On a GPU the host then waits for all queued work.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from frontier_llm.model.experts import MixtureOfExperts
from frontier_llm.ops.native import load_cpu_library
from tests.harness.pool import RankPool
from tests.parity.cases import Case
from tests.parity.three_steps import build

pytestmark = pytest.mark.skipif(bool(load_cpu_library()), reason="scripts/build_native.sh")
# Operators that copy data to the host in torch's CUDA implementation.
WAIT = {"_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}


class Waits(TorchDispatchMode):
    """Records these operators, and calls of tolist(), which is not an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __enter__(self) -> Waits:
        plain = Tensor.tolist

        def tolist(tensor: Tensor) -> Any:
            self.names.append("tolist")
            return plain(tensor)

        self._patch = patch.object(Tensor, "tolist", tolist)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        kwargs = kwargs or {}
        by_mask = name.startswith("index") and any(
            isinstance(one, Tensor) and one.dtype is torch.bool for one in _indices(args)
        )
        if name in WAIT or by_mask or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.names.append(name)
        return func(*args, **kwargs)


def _indices(args: Any) -> Any:
    return args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()


def waits(rank: int, case: Case) -> tuple[list[str], list[str]]:
    """Return the waits of one layer's forward and of its backward, with the C++ ops in fp32."""
    state = build(rank, case, "fp32")
    layer = next(module for module in state.stages[0].modules() if isinstance(module, MixtureOfExperts))
    state.sync.begin()
    x = torch.randn(12, case.micro_batch, 32, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    with Waits() as forward:
        y, routed = layer(x)
    # Rows are dropped if there is a capacity.
    assert y.isfinite().all() and routed.load[-1] > 0 if layer.router.moe.capacity else routed.load[-1] == 0
    with Waits() as backward:
        (y.sum() + routed.balance).backward()
    assert x.grad is not None and x.grad.isfinite().all()
    return forward.names, backward.names


def experts(ep: int, *more: str) -> tuple[str, ...]:
    return (f"parallel.expert={ep}", "ops.experts=cpu", *more)


HIERARCHICAL = "parallel.expert_all_to_all=hierarchical"
CAPACITY = "model.moe.capacity=0.75"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("deepseek", dp=2, settings=experts(2, CAPACITY)), []),
        (Case("olmoe", dp=4, settings=experts(4, CAPACITY, HIERARCHICAL), ranks_per_node=2), []),
        (Case("olmoe", dp=4, settings=experts(4, CAPACITY, HIERARCHICAL), ranks_per_node=1), []),
        (Case("olmoe", settings=experts(1, CAPACITY)), []),
        (Case("olmoe", settings=experts(1)), []),
        (Case("deepseek", dp=2, settings=experts(2)), ["tolist"]),
        (Case("olmoe", dp=4, settings=experts(4, HIERARCHICAL), ranks_per_node=2), ["tolist"] * 2),
    ],
    ids=str,
)
def test_the_host_waits_for_numbers_of_rows_once_a_stage_and_with_a_capacity_never(
    ranks: RankPool, case: Case, expected: list[str]
) -> None:
    for forward, backward in ranks.run(case.world_size, waits, case):
        assert forward == expected and backward == []
