"""A custom optimizer that is registered through the documented interface (docs/engines.md).

Covers ZeRO-1, replica checks, resume, memory and matrices that are kept on one rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frontier_llm.blueprint.optimizers import OptimizerRule
from frontier_llm.blueprint.parameters import (
    How,
    Parameter,
    ParameterKind,
    Split,
)
from frontier_llm.config import OptimizerConfig
from frontier_llm.errors import CheckpointError
from frontier_llm.ops import Ops
from frontier_llm.optim import Slice, register
from frontier_llm.training.guard import ReplicaCheck
from frontier_llm.training.step import train_step
from tests.harness.marks import but_first, thorough
from tests.harness.pool import RankPool
from tests.harness.saving import checkpoints_of, save_step
from tests.oracle.optimizers import momentum
from tests.parity.cases import Case
from tests.parity.compare import differences, gather
from tests.parity.three_steps import RankResult, build, train_case
from tests.parity.witness import witness

SGD = OptimizerRule("sgd-momentum", lambda parameter: ("momentum",))
WHOLE = OptimizerRule(
    "sgd-whole", lambda parameter: ("momentum",), whole=lambda parameter: parameter.kind is ParameterKind.MATRIX
)


def states(parameter: Parameter) -> tuple[str, ...]:
    return ("momentum", "mean") if parameter.kind is ParameterKind.MATRIX else ("momentum",)


MIXED = OptimizerRule("sgd-mixed", states)  # matrices have more states than other parameters


class Momentum:
    """The formula of torch.optim.SGD with decoupled weight decay."""

    def __init__(self, config: OptimizerConfig, ops: Ops) -> None:
        self.config = config

    def update(self, part: Slice, lr: float, step: int, grad_scale: float | Tensor) -> None:
        momentum = part.states["momentum"].mul_(self.config.betas[0]).add_(part.gradient * grad_scale)
        part.master.mul_(1 - lr * self.config.weight_decay * part.decay).sub_(lr * momentum)
        if "mean" in part.states:
            part.states["mean"].add_(part.gradient * grad_scale)
        part.weights.copy_(part.master)


def size(parameter: Parameter) -> tuple[Parameter, ...]:
    """Return one number per parameter. Each rank that holds a part of the parameter adds to it."""
    axes = {axis: How.PARTIAL if isinstance(how, Split) else How.REPLICATED for axis, how in parameter.axes.items()}
    return (replace(parameter, name=f"{parameter.name}.size", shape=(1,), axes=axes, pieces=(), grouped=False),)


NORMALIZED = OptimizerRule("sgd-normalized", lambda parameter: (), statistics=size)


class Normalized:
    """Divides each parameter's gradient by the root of a moving average of its squared norm. The updates of all
    parameters then have about the same norm (Ginsburg et al. 2019).
    """

    def __init__(self, config: OptimizerConfig, ops: Ops) -> None:
        self.config = config

    def update(self, part: Slice, lr: float, step: int, grad_scale: float | Tensor) -> None:
        sizes = part.statistics
        direction = part.gradient * grad_scale
        assert sizes is not None
        squares = torch.zeros_like(sizes.values)
        views = sizes.by_parameter(squares)
        for run in sizes.runs():
            views[run.spec.name][0].copy_(direction[run.place].square().sum())
        sizes.values.lerp_(sizes.sum_(squares), 1 - self.config.betas[1])
        for run in sizes.runs():
            direction[run.place] /= sizes.by_parameter(sizes.values)[run.spec.name][0].sqrt() + self.config.eps
        part.master.mul_(1 - lr * self.config.weight_decay * part.decay).sub_(lr * direction)
        part.weights.copy_(part.master)


for rule in (SGD, WHOLE, MIXED):
    register(rule, Momentum)
register(NORMALIZED, Normalized)


def train_case_here(rank: int, case: Case) -> RankResult:
    """Run `train_case` in this module, so that the ranks import it and register its optimizers."""
    return train_case(rank, case)


def named(rule: OptimizerRule, *settings: str, **layout: Any) -> Case:
    return Case(settings=(f"optimizer.name={rule.name}", *settings), **{"family": "gpt", **layout})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        thorough(named(SGD, tp=2, dp=2, sequence_parallel=True)),
        thorough(named(SGD, pp=2, dp=2)),
        named(MIXED, pp=2, dp=2),
        named(WHOLE, tp=2, dp=2),
    ],
    ids=str,
)
def test_it_trains_as_the_serial_formula(ranks: RankPool, case: Case) -> None:
    run = gather(ranks.run(case.world_size, train_case_here, case))
    assert differences(run, witness(case, run.initial, momentum(case.config().optimizer.betas[0]))) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout", but_first([{"tp": 2, "dp": 2, "bucket_elements": 3000}, {"pp": 2, "dp": 2, "zero": 0}]), ids=str
)
def test_a_statistic_is_of_the_whole_parameter(ranks: RankPool, layout: dict[str, int]) -> None:
    """Tied embeddings are included: two stages each hold a copy."""
    case = named(NORMALIZED, **layout)
    run = gather(ranks.run(case.world_size, train_case_here, case))
    optimizer = case.config().optimizer
    sizes: defaultdict[str, float] = defaultdict(float)

    def direction(name: str, gradient: Tensor, update: int) -> Tensor:
        sizes[name] += (1 - optimizer.betas[1]) * (float(gradient.square().sum()) - sizes[name])
        return gradient / (sizes[name] ** 0.5 + optimizer.eps)

    assert differences(run, witness(case, run.initial, direction)) == []


def places(rank: int, case: Case) -> tuple[int, int, int]:
    """Return the number of pieces of matrices, the number of complete matrices among them, and the elements of this
    rank's states.
    """
    state = build(rank, case)
    runs = [run for bucket in state.optimizer.buckets if bucket.whole for run in bucket.owned_ranges()]
    full = [run for run in runs if run.stop - run.start == run.spec.numel]
    return len(runs), len(full), sum(tensor.numel() for held in state.optimizer.states for tensor in held.values())


@pytest.mark.parametrize(
    "layout",
    but_first([{"dp": 2, "bucket_elements": 3000}, {"dp": 2}, {"tp": 2, "dp": 2}, {"dp": 2, "zero": 0}]),
    ids=str,
)
def test_whole_matrices_give_the_same_bits(ranks: RankPool, layout: dict[str, int]) -> None:
    """The optimizer is elementwise. Clipping is off, because the norm is summed in another order."""
    cases = [named(rule, "optimizer.clip_norm=0", **layout) for rule in (WHOLE, SGD)]
    whole, cut = (gather(ranks.run(case.world_size, train_case_here, case)) for case in cases)
    for name, tensor in cut.final.items():
        assert np.array_equal(whole.final[name], tensor), name


@pytest.mark.thorough
def test_whole_matrices_lie_with_one_owner_each_and_evenly(ranks: RankPool) -> None:
    for size in (3000, 40_000_000):  # in the large bucket two layers happen to fill one owner's slice
        answers = ranks.run(4, places, named(WHOLE, dp=4, bucket_elements=size))
        assert all(runs == full > 0 for runs, full, _ in answers)
        assert sum(runs for runs, _, _ in answers) == 4 * 8  # four matrices in each of eight layers
    cut = ranks.run(4, places, named(SGD, dp=4))[0][2]
    assert all(held <= 1.1 * cut for _, _, held in answers)
    assert ranks.run(4, places, named(SGD, dp=4))[0][0] == 0


def save_and_go_on(rank: int, case: Case, directory: Path) -> list[float]:
    """Return the losses of three steps. A checkpoint is saved after the second."""
    state = build(rank, case)
    losses = [train_step(state).loss for _ in range(2)]
    save_step(state, directory, step=2, samples=16, tokens=192)
    return [*losses, train_step(state).loss]


def resume(rank: int, case: Case, directory: Path, *allowed: str) -> tuple[float, int, float] | str:
    """Return the third step's loss, the updates before it and the largest value of the states except the master
    weights.

    Returns the message of the error if the checkpoint is refused.
    """
    state = build(rank, case)
    checkpoints = checkpoints_of(state, directory, *allowed)
    try:
        progress = checkpoints.newest()
    except CheckpointError as error:
        return str(error)
    finally:
        checkpoints.close()
    assert progress is not None
    state.current_step = progress.step
    ReplicaCheck(state.optimizer, state.mesh).check(2, state.mesh.world)
    largest = max(
        float(values.abs().max())
        for part in state.optimizer.state()
        for kind, values in part.tensors.items()
        if kind != "master"
    )
    updates = state.optimizer.updates
    return train_step(state).loss, updates, largest


@pytest.mark.thorough
@pytest.mark.parametrize("rule", but_first([MIXED, SGD, WHOLE]), ids=lambda rule: rule.name)
def test_it_resumes_on_another_layout(ranks: RankPool, rule: OptimizerRule, tmp_path: Path) -> None:
    losses = ranks.run(4, save_and_go_on, named(rule, tp=2, dp=2), tmp_path)[0]
    for loss, updates, largest in ranks.run(4, resume, named(rule, pp=2, dp=2), tmp_path):
        assert loss == pytest.approx(losses[2], rel=1e-12)
        assert updates == 2 and largest > 0


@pytest.mark.thorough
def test_a_checkpoint_of_another_optimizer_gives_its_weights_alone_and_only_when_allowed(
    ranks: RankPool, tmp_path: Path
) -> None:
    losses = ranks.run(2, save_and_go_on, named(SGD, dp=2), tmp_path)[0]
    for refused in ranks.run(2, resume, Case("gpt", tp=2), tmp_path):
        assert "optimizer.name: 'sgd-momentum' → 'adamw' (only the weights would be loaded)" in refused
        assert "--allow-change optimizer.name" in refused
    for case in (Case("gpt", tp=2), named(NORMALIZED, tp=2)):  # the checkpoint has no values of a statistic
        for loss, updates, largest in ranks.run(2, resume, case, tmp_path, "optimizer.name"):
            assert loss == pytest.approx(losses[2], rel=1e-12)  # the weights come from the checkpoint
            assert (updates, largest) == (0, 0.0)
