"""Tests that on a GPU the host runs ahead of the device until it reads a number.

A step reads once, to decide whether to update.
"""

from __future__ import annotations

import pytest
import torch

from frontier_llm.comm import Axis, StragglerWatch, build_mesh, serial_mesh
from frontier_llm.model import Microbatch, losses
from frontier_llm.model.losses import LossTerm
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import build_state
from frontier_llm.training.guard import Requests
from frontier_llm.training.step import train_step
from tests.harness.marks import but_first
from tests.harness.pool import RankPool
from tests.harness.waits import Waits
from tests.parity.cases import Case
from tests.parity.three_steps import Source


@pytest.mark.parametrize("family", ["gpt", "llama", "mpt", "olmoe", "deepseek"])
@pytest.mark.parametrize("recompute", but_first(["full", "none"]))
def test_the_host_reads_the_device_once(family: str, recompute: str) -> None:
    case = Case(family, recompute=recompute)
    config = case.config("fp32")
    source = Source(case, 0)
    state = build_state(config, make_plan(config, 1), serial_mesh(), torch.device("cpu"), source)
    with Waits() as waits:
        result = train_step(state)
    assert waits.names == ["cpu"]
    assert waits.waits[0].line.startswith("frontier_llm/training/step.py:")
    assert bool(result.routing) == (family in ("olmoe", "deepseek"))


def test_each_way_to_wait_is_seen() -> None:
    x = torch.arange(4.0)
    copied = {"device": x.device}
    index = torch.tensor([1])
    with Waits() as waits:
        x[[0, 2]]
        x[[0, 2]] = 1.0
        torch.tensor([1.0, 2.0], **copied)
        x[0].item()
        float(x[1])
        x.tolist()
        x.to("cpu")
        x[x > 1]
        x.cpu().tolist()
        # none of these operations makes the host wait for the device
        x[1:3] = 0.5
        x.to(torch.float64)
        x.to("cpu", non_blocking=True)
        x[index]
    read = "_local_scalar_dense"
    assert waits.names == ["__getitem__", "__setitem__", "tensor", read, read, "tolist", "to", "index", "cpu"]


def _ordinary_steps(rank: int, case: Case) -> list[tuple[list[str], dict[str, int], Requests]]:
    """Run steps as the training loop does. Rank 1 requests a save in the third step.

    Return for each step the waits, calls on the world axis, and the requests that all ranks agreed on.
    """
    config = case.config("fp32")
    plan = make_plan(config, case.world_size)
    mesh = build_mesh(plan.grid, rank, plan.placement)
    state = build_state(config, plan, mesh, torch.device("cpu"), Source(case, mesh.dp.rank))
    watch = StragglerWatch(mesh, plan.grid, state.device, "n0", 50)
    steps = []
    for step in range(4):
        mesh.ledger.calls.clear()
        requests = Requests(save=rank == 1 and step == 2)
        with Waits() as waits, watch.step():
            result = train_step(state, lambda requests=requests: requests)  # type: ignore[misc]
        world = {operation: calls for (axis, operation), calls in mesh.ledger.calls.items() if axis == "world"}
        steps.append((waits.names, world, result.requests))
    return steps


@pytest.mark.parametrize("case", [Case("gpt", dp=2), Case("llama", tp=2)], ids=str)
def test_an_ordinary_step_has_one_sum_over_the_world_and_one_wait(ranks: RankPool, case: Case) -> None:
    for steps in ranks.run(case.world_size, _ordinary_steps, case):
        assert [step[:2] for step in steps] == [(["cpu"], {"all_reduce": 1})] * 4
        assert [step[2] for step in steps] == [Requests(), Requests(), Requests(save=True), Requests()]


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


def test_further_losses_of_logits_are_evaluated_in_the_order_of_the_run_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may call collectives, so that all tp ranks need the same order."""
    called: list[str] = []

    def term(name: str) -> LossTerm:
        def value(logsumexp_SB: torch.Tensor, batch: Microbatch, tp: Axis) -> torch.Tensor:
            called.append(name)
            return logsumexp_SB.mean() * 0

        return LossTerm(value, of_logits=True)

    names = [f"term-{number}" for number in range(8)]
    for name in names:
        monkeypatch.setitem(losses._TERMS, name, term(name))
    weights = ", ".join(f"{name}: 1" for name in names)
    case = Case("llama", settings=(f"train.loss_weights={{{weights}}}",))
    config = case.config()
    source = Source(case, 0)
    train_step(build_state(config, make_plan(config, 1), serial_mesh(), torch.device("cpu"), source))
    assert called == names * source.microbatches
