"""The tensors that are kept between the I and the W of a split backward, and their lifetime."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from frontier_llm.blueprint.parameters import Parameter, ParameterKind
from frontier_llm.config import OpsConfig
from frontier_llm.model.recompute import recompute
from frontier_llm.ops import select_ops
from frontier_llm.parallel.tensor import ShardedParameter, WeightGradients
from frontier_llm.parallel.tensor.gradients import Factor
from frontier_llm.topology.shards import shard


def test_each_product_lets_go_of_its_factors_before_the_next_but_one() -> None:
    parameter = ShardedParameter.create(
        torch.zeros(2), shard(Parameter("weight", (2,), ParameterKind.VECTOR)), layer_accumulates=True
    )
    parameter.main_grad = torch.zeros(2)
    gradients = WeightGradients()
    factors = []

    def submit(value: float) -> None:
        # the tensor is part of an autograd graph, like a tensor saved for backward
        saved = torch.full((2,), value, requires_grad=True) * 2
        factor = Factor(saved)
        factors.append(weakref.ref(factor))

        def accumulate(gradient: Tensor) -> None:
            gradient += factor.whole()

        gradients.submit(parameter, accumulate, (factor,))

    gradients.defer()
    for value in (1.0, 2.0, 3.0):
        submit(value)
    work = gradients.take_deferred()
    assert not parameter.main_grad.any()
    assert not any(factor.tensor.requires_grad for _, _, (factor,) in work)
    alive: list[int] = []
    gradients.on_accumulated = lambda _: alive.append(sum(factor() is not None for factor in factors))
    gradients.run(work)
    assert alive == [3, 2, 1]
    assert parameter.main_grad.tolist() == [12.0, 12.0]


class _Doubled(torch.autograd.Function):
    """Like the backward of norms and biases: the gradient of a bf16 parameter is summed in fp32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].float() + 2**-12


def test_what_autograd_brings_reaches_the_fp32_buffer_unrounded() -> None:
    shape = shard(Parameter("weight", (2,), ParameterKind.VECTOR))
    parameter = ShardedParameter.create(torch.zeros(2, dtype=torch.bfloat16), shape)
    gradients = WeightGradients()
    parameter.main_grad = torch.zeros(2)
    gradients.collect_from_autograd(parameter, select_ops(OpsConfig(), "cpu", torch.float32))
    for _ in range(3):
        _Doubled.apply(parameter).sum().backward()
    assert parameter.main_grad.tolist() == [3 * (1 + 2**-12)] * 2 and parameter.grad is None


def test_rows_of_partial_sums_reach_the_fp32_buffer_now_or_as_their_sum_in_the_w_action() -> None:
    spec = shard(Parameter("weight", (2,), ParameterKind.VECTOR))
    parameter = ShardedParameter.create(torch.zeros(2, dtype=torch.bfloat16), spec)
    parameter.main_grad = torch.zeros(2)
    gradients = WeightGradients()
    gradients.collect_from_autograd(parameter, select_ops(OpsConfig(), "cpu", torch.float32))
    take = parameter.take_gradient_rows
    assert take is not None
    rows = torch.tensor([[1.0, 2**-12], [2.0, 1.0], [4.0, 0.0]])
    take(parameter, rows)
    now = [7.0, 1 + 2**-12]
    assert parameter.main_grad.tolist() == now

    gradients.defer()
    take(parameter, rows)
    work = gradients.take_deferred()
    assert parameter.main_grad.tolist() == now
    rows.zero_()  # the W action needs the rows no more
    gradients.run(work)
    assert parameter.main_grad.tolist() == [2 * value for value in now]


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_norm_passes_its_rows_past_autograd(recomputed: bool) -> None:
    """Recomputation replaces the saved weight by a tensor without attributes."""
    spec = shard(Parameter("weight", (4,), ParameterKind.VECTOR))
    parameter = ShardedParameter.create(torch.ones(4), spec)
    passed: list[Tensor] = []
    parameter.take_gradient_rows = lambda _, rows_RC: passed.append(rows_RC)
    ops = select_ops(OpsConfig(), "cpu", torch.float32)
    x = torch.tensor([[1.0, -1.0, 1.0, 1.0], [1.0, 1.0, 1.0, -1.0]], requires_grad=True)

    def norm(x: Tensor) -> Tensor:
        return ops.rms_norm(x, parameter, 0.0)

    y = recompute(norm, x) if recomputed else norm(x)
    y.sum().backward()
    (rows_RC,) = passed
    assert rows_RC.sum(0).tolist() == [2.0, 0.0, 2.0, 0.0] and parameter.grad is None
