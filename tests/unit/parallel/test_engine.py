"""The tensors that the engine keeps alive: an output until its message is taken, an input until its backward.

In an evaluation the engine keeps none.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm import DONE, Axis, Mesh, Pending, single
from frontier_llm.comm.group import Sending
from frontier_llm.parallel.pipeline import SENDS_AHEAD, Engine
from frontier_llm.parallel.stages import ActivationSpec, StageOutput
from frontier_llm.parallel.tensor import WeightGradients
from frontier_llm.schedule import Schedule, ScheduleError, build, forward_only

STAGES = 4
MICROBATCHES = 24


class Waited:
    """A message that is not taken until its sender waits for it."""

    def is_done(self) -> bool:
        return False

    def wait(self) -> None:
        pass


class Neighbour:
    """Sends ones. Takes each message at once if `prompt`, otherwise when the sender waits."""

    def __init__(self, prompt: bool) -> None:
        self._prompt = prompt

    def send(self, x: Tensor, to: int) -> Sending:
        return DONE if self._prompt else Waited()

    def receive(self, buffer: Tensor, source: int) -> Pending:
        buffer.fill_(1.0)
        return DONE


class Living:
    """Counts the activations that are alive."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def new(self) -> Tensor:
        """Return a zero in memory that is counted until it is freed."""
        array = np.zeros(1)
        weakref.finalize(array, self._freed)
        self.now += 1
        self.peak = max(self.peak, self.now)
        return torch.from_numpy(array)

    def _freed(self) -> None:
        self.now -= 1


class Add(Function):
    """Like the last residual addition of a block: its backward needs neither input nor output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, outputs: Living) -> Tensor:
        return outputs.new().add_(x).add_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], grads[0], None


def mesh_of(rank: int, group: Neighbour) -> Mesh:
    ones = {name: single(name) for name in ("tp", "cp", "dp", "replicas", "world", "tied")}
    pp = Axis("pp", rank, STAGES, tuple(range(STAGES)))
    channels = {name: replace(pp, name=name, group=group) for name in ("forward", "backward")}  # type: ignore[arg-type]
    return Mesh(**ones, pp=pp, channels=channels)


def run_schedule(schedule: Schedule, rank: int, prompt: bool = True) -> tuple[int, Tensor, float]:
    """Run one rank with neighbours that always send at once.

    Return the largest number of outputs alive at once, the weight's gradient and the loss.
    """
    outputs = Living()
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    group = Neighbour(prompt)

    def stage(x: Tensor | None, microbatch: Any) -> Tensor:
        y = Add.apply(torch.ones(1, dtype=torch.float64) if x is None else x, weight, outputs)
        return y.sum() if rank == STAGES - 1 else y

    mesh = mesh_of(rank, group)
    engine = Engine(
        schedule, [stage], mesh, WeightGradients(), ActivationSpec((1,), torch.float64, torch.device("cpu"))
    )
    loss = engine.run(lambda microbatch: microbatch, loss_scale=2.0)["loss"]
    assert outputs.now == 0
    return outputs.peak, torch.zeros(1) if weight.grad is None else weight.grad, float(loss)


@pytest.mark.parametrize("rank", range(STAGES - 1))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("prompt", [True, False])
def test_outputs_are_freed_when_their_messages_are_taken(prompt: bool, name: str, rank: int) -> None:
    peak, gradient, _ = run_schedule(build(name, STAGES, MICROBATCHES), rank, prompt)
    assert peak == (1 if prompt else SENDS_AHEAD) + 1
    assert gradient.item() == MICROBATCHES  # the gradient that each microbatch returns is 1


@pytest.mark.parametrize("rank", range(STAGES))
def test_an_evaluation_keeps_nothing_of_earlier_microbatches(rank: int) -> None:
    with torch.no_grad():
        peak, _, loss = run_schedule(forward_only(build("1f1b", STAGES, MICROBATCHES)), rank)
    assert peak <= SENDS_AHEAD + 1
    assert loss == (2.0 * MICROBATCHES if rank == STAGES - 1 else 0.0)


def test_the_last_stage_scales_its_loss_gradient() -> None:
    _, gradient, loss = run_schedule(build("1f1b", STAGES, MICROBATCHES), STAGES - 1)
    assert gradient.item() == 2.0 * MICROBATCHES and loss == 2.0 * MICROBATCHES


@pytest.mark.parametrize("rank", range(STAGES))
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_further_loss_of_any_stage_joins_its_backward(name: str, rank: int) -> None:
    """The gradient includes the weight of the loss, the reported sum does not. The input's gradient has both parts."""
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    group = Neighbour(prompt=True)

    def stage(x: Tensor | None, microbatch: Any) -> StageOutput:
        y = (torch.ones(1, dtype=torch.float64) if x is None else x) + weight
        return StageOutput(y.sum() if rank == STAGES - 1 else y, {"further": 3 * y.sum()})

    engine = Engine(
        build(name, STAGES, MICROBATCHES),
        [stage],
        mesh_of(rank, group),
        WeightGradients(),
        ActivationSpec((1,), torch.float64, torch.device("cpu")),
        loss_weights={"further": 0.25, "absent": 1.0},
    )
    sums = {key: float(value) for key, value in engine.run(lambda microbatch: microbatch, loss_scale=2.0).items()}
    y = 2.0
    assert sums == {
        "loss": y * MICROBATCHES if rank == STAGES - 1 else 0.0,
        "further": 3 * y * MICROBATCHES,
        "absent": 0.0,
    }
    assert weight.grad is not None
    own = 2.0 if rank == STAGES - 1 else 1.0  # the loss scale, or the neighbour's gradient
    assert weight.grad.item() == MICROBATCHES * (own + 2.0 * 0.25 * 3)


def test_a_schedule_that_forgets_something_is_refused_before_it_plays() -> None:
    """A plugin may register such a schedule. Without the check a microbatch would be missing from the gradients."""
    legal = build("gpipe", STAGES, 2)
    forgetful = replace(
        legal, actions=tuple(tuple(a for a in actions if str(a) != "B1@3") for actions in legal.actions)
    )
    for rank in range(STAGES - 1):
        run_schedule(forgetful, rank)  # a rank checks its own actions only
    with pytest.raises(ScheduleError, match="stage 3: B1@3 is missing"):
        run_schedule(forgetful, STAGES - 1)
