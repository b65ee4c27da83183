"""On a GPU the host runs ahead of the device until it reads a number.

A step reads once, to decide whether to update.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from frontier_llm.comm import StragglerWatch, build_mesh, serial_mesh
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import build_state
from frontier_llm.training.guard import Requests
from frontier_llm.training.step import train_step
from tests.harness.marks import but_first
from tests.harness.pool import RankPool
from tests.parity.cases import Case
from tests.parity.three_steps import Source

# Operations that make the host wait for a GPU: a value is read, or a shape depends on values.
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
@pytest.mark.parametrize("recompute", but_first(["full", "none"]))
def test_the_host_reads_the_device_once(family: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(family, recompute=recompute)
    config = case.config("fp32")
    source = Source(case, 0)
    state = build_state(config, make_plan(config, 1), serial_mesh(), torch.device("cpu"), source)
    reads = []
    tolist = torch.Tensor.tolist  # on the CPU it is not a separate operation
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or tolist(tensor))
    with Waits() as waits:
        train_step(state)
    assert len(reads) == 1 and waits.counts == Counter()


def _ordinary_steps(rank: int, case: Case) -> list[tuple[int, int, dict[str, int], Requests]]:
    """Run steps as the training loop does. Rank 1 requests a save in the third step.

    Return for each step the values read, other waits, calls on the world axis, and the requests that all ranks agreed
    on.
    """
    config = case.config("fp32")
    plan = make_plan(config, case.world_size)
    mesh = build_mesh(plan.grid, rank, plan.placement)
    state = build_state(config, plan, mesh, torch.device("cpu"), Source(case, mesh.dp.rank))
    watch = StragglerWatch(mesh, plan.grid, state.device, "n0", 50)
    reads = []
    steps = []
    tolist = torch.Tensor.tolist
    torch.Tensor.tolist = lambda tensor: reads.append(tensor) or tolist(tensor)  # type: ignore[method-assign,assign,func-returns-value]
    try:
        for step in range(4):
            mesh.ledger.calls.clear()
            reads.clear()
            with Waits() as waits, watch.step():
                requests = Requests(save=rank == 1 and step == 2)
                result = train_step(state, lambda requests=requests: requests)  # type: ignore[misc]
            world = {operation: calls for (axis, operation), calls in mesh.ledger.calls.items() if axis == "world"}
            steps.append((len(reads), sum(waits.counts.values()), world, result.requests))
    finally:
        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize("case", [Case("gpt", dp=2), Case("llama", tp=2)], ids=str)
def test_an_ordinary_step_has_one_sum_over_the_world_and_one_wait(ranks: RankPool, case: Case) -> None:
    for steps in ranks.run(case.world_size, _ordinary_steps, case):
        assert [step[:3] for step in steps] == [(1, 0, {"all_reduce": 1})] * 4
        assert [step[3] for step in steps] == [Requests(), Requests(), Requests(save=True), Requests()]


def test_the_squared_log_sum_exp_is_logged_without_its_weight() -> None:
    case = Case("llama", settings=("train.loss_weights={output-z: 0.5}",))
    config = case.config()
    source = Source(case, 0)
    state = build_state(config, make_plan(config, 1), serial_mesh(), torch.device("cpu"), source)
    squares = []
    for index in range(source.microbatches):
        with torch.no_grad():
            x = state.stages[0].hidden(None, state.feed.microbatch(0, index, 1))
            squares.append(state.stages[0].logits(x).logsumexp(-1).square().mean())
    assert train_step(state).further_losses == {
        "output-z": pytest.approx(float(torch.stack(squares).mean()), rel=1e-12)
    }
